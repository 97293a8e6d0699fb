"""Small buffered calls, started without a task."""
