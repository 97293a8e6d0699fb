"""JSON text: scanned, cut and read while it arrives."""
