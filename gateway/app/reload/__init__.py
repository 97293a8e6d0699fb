"""Reloads: where settings come from, what they load, what differs, which are in use."""
