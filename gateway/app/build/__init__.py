"""Settings → the parts of a gateway."""
