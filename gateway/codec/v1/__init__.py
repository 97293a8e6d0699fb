"""Readers and writers of the V1 prediction protocol."""
