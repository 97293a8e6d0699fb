"""HTTP/1.1 as both ends of the gateway speak it: RFC 9112."""
