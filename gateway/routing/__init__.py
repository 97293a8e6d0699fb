"""Routing decisions as pure functions of state, clock and randomness."""
