"""JSON text ↔ tensor bytes, incrementally and without I/O."""
