"""The operating system: memory, descriptors, files, sockets, certificates."""
