"""Inference calls: requests and responses converted between client and server."""
