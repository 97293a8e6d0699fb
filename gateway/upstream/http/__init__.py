"""HTTP/1.1 to servers: connections, TLS, addresses."""
