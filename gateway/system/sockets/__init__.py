"""One end of a connection: its socket, its backpressure, and the bodies that arrive on it."""
