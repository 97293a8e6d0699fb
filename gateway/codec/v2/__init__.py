"""Readers and writers of the Open Inference Protocol, in JSON and binary form."""
