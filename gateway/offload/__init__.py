"""A process on another core that converts numbers for the gateway."""
