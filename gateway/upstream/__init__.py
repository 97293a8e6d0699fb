"""I/O towards the servers."""
