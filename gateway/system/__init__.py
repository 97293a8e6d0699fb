"""What the gateway asks of the operating system: files, memory, sockets, certificates."""
