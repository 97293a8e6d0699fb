"""Triton's generate extension: JSON without datatypes and shapes, for one request and response."""
