"""Tensorgate: a streaming reverse proxy for the Open Inference Protocol."""

__version__ = "0.1.0"
