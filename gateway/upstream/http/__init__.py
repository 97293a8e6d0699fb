"""HTTP/1.1 to one endpoint of an upstream."""
