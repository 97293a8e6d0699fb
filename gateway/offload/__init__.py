"""A process on another core that converts large tensors for a worker."""
