"""Write gateway/protocol/grpc/descriptors.binpb: what the gateway knows of messages, and serves.

Run it as ``python -m tests.support.grpc.generate_descriptors`` after a change of a .proto file. It
takes protoc, which grpcio-tools brings.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from grpc_tools import protoc

from tests.support.grpc.proto_file import FOLDER

FILE = FOLDER / "descriptors.binpb"

_PATHS = {
    "inference.proto": "inference.proto",
    "grpc/health/v1/health.proto": "health.proto",
    "grpc/reflection/v1/reflection.proto": "reflection.proto",
    "grpc/reflection/v1alpha/reflection.proto": "reflection.proto",
}
"""The public path of each file, which clients see, and where it is here."""


def descriptors() -> bytes:
    """Return the descriptors of the .proto files, a serialized FileDescriptorSet."""
    with TemporaryDirectory() as name:
        for path, source in _PATHS.items():
            target = Path(name, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            package = Path(path).parent.as_posix().replace("/", ".")
            text = (FOLDER / source).read_text()
            target.write_text(text.replace("package grpc.reflection.v1;", f"package {package};"))
        written = Path(name, "descriptors.binpb")
        done = protoc.main(["protoc", f"-I{name}", f"--descriptor_set_out={written}", *_PATHS])
        assert done == 0
        return written.read_bytes()


if __name__ == "__main__":
    FILE.write_bytes(descriptors())
