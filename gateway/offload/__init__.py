"""Threads that convert parts of large tensors on other cores."""
