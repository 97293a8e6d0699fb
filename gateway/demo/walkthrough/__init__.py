"""Calls through the gateway, printed as both sides see them."""
