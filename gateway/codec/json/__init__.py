"""JSON text, scanned and split while it arrives."""
