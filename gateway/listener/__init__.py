"""I/O towards clients."""
