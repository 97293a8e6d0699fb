"""Settings → a gateway at work."""
