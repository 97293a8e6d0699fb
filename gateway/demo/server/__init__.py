"""A small inference server that speaks the protocol as Triton does."""
