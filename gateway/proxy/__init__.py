"""Serves one call: routing, admission, conversion, forwarding."""
