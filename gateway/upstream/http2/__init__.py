"""HTTP/2 to servers: connections, each with many streams."""
