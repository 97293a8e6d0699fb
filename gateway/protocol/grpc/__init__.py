"""The protobuf messages of the protocol's gRPC form: wire format and field numbers."""
