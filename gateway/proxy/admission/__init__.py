"""Concurrency limits, memory budget, deadlines and time slices."""
