"""Checks before serving: probes of servers, and settings that lead back to the gateway."""
