"""One request from its first byte to the last byte of its answer."""
