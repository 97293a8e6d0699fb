"""Sends a call that an operator has composed through the gateway, and shows all that was sent."""
