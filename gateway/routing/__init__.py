"""Which server a request goes to: pure functions of state, clock and randomness."""
