"""Calls over gRPC: PROTOCOL-HTTP2.md of grpc."""
