"""The offload process: converts parts of large tensors for a worker."""
