"""The demo: calls through the gateway, printed as both sides saw them."""
