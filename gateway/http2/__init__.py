"""HTTP/2 for both sides of the gateway: header compression and frames (RFC 7541, RFC 9113)."""
