"""Calls that are fully buffered on both sides: served without a task."""
