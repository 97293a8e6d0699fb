"""HTTP/1.1 for both sides of the gateway: heads, bodies and connections (RFC 9112)."""
