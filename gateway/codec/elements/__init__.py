"""Tensor elements ↔ the text of JSON elements."""
