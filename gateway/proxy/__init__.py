"""One call, from the first byte of its request to the last byte of its response."""
