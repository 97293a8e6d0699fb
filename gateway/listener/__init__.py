"""Accepts clients: sockets, TLS, connections, dispatch of requests."""
