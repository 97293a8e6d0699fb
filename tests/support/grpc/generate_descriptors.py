"""Write gateway/protocol/grpc/descriptors.binpb, which server reflection serves.

Run it as ``python -m tests.support.grpc.generate_descriptors`` after a change of a .proto file. It
takes the official protobuf runtime, which the gateway does without.
"""

from __future__ import annotations

from tests.support.grpc.proto_file import FOLDER, proto_files

FILE = FOLDER / "descriptors.binpb"


def descriptors() -> bytes:
    """Return the descriptors of the .proto files, serialized in the same way each time."""
    return bytes(proto_files().SerializeToString(deterministic=True))


if __name__ == "__main__":
    FILE.write_bytes(descriptors())
