"""Readers and writers of infer requests and responses in protobuf, as gRPC carries them."""
