"""Converts tensor elements between JSON text and binary form."""
