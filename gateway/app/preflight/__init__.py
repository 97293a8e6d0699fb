"""Checks before serving: probes of servers, and endpoints that point to the gateway itself."""
