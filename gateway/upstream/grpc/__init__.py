"""Servers that are reached over gRPC."""
