"""The messages of the .proto files, as protobuf's classes.

``descriptors.binpb`` is a FileDescriptorSet, which ``make descriptors`` makes of the .proto files.
Import this where it is first used: protobuf takes 30 ms and 7 MB.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FILES: Final[Any] = descriptor_pb2.FileDescriptorSet.FromString(
    Path(__file__).with_name("descriptors.binpb").read_bytes()
)
"""The files, which import no others."""

POOL: Final[Any] = descriptor_pool.DescriptorPool()
"""What they declare, apart from what other packages declare in the process."""

for _file in FILES.file:
    POOL.AddSerializedFile(_file.SerializeToString())


@cache
def message_class(full_name: str) -> Any:
    """Return the class of a message; raises KeyError."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(full_name))
