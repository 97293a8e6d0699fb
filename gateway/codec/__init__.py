"""Converts between JSON text and binary tensors, incrementally and without I/O."""
