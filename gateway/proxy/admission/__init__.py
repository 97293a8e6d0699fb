"""What a call must pass before it is served: concurrency, memory, time."""
