"""Access log, log of failed calls, and metrics."""
