"""Worker processes, and the supervisor that starts them and distributes connections."""
