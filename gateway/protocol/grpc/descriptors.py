"""Reads the descriptors of the .proto files: what is declared in them, by its full name.

``descriptors.binpb`` is a FileDescriptorSet, which ``make descriptors`` makes of the .proto files.
The fields of descriptors are those of google/protobuf/descriptor.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.protocol.grpc.wire import LENGTH, Buffer, WireReader

# At import, when a file can surely be opened, and is of this version.
_FILES: Final = Path(__file__).with_name("descriptors.binpb").read_bytes()

_NAME: Final = 1
_PACKAGE: Final = 2


class Kind(Enum):
    """What a descriptor describes."""

    FILE = auto()
    MESSAGE = auto()
    FIELD = auto()
    ONEOF = auto()
    ENUM = auto()
    VALUE = auto()
    SERVICE = auto()
    METHOD = auto()


_PARTS: Final[Mapping[Kind, Mapping[int, Kind]]] = {
    Kind.FILE: {4: Kind.MESSAGE, 5: Kind.ENUM, 6: Kind.SERVICE},
    Kind.MESSAGE: {2: Kind.FIELD, 3: Kind.MESSAGE, 4: Kind.ENUM, 8: Kind.ONEOF},
    Kind.ENUM: {2: Kind.VALUE},
    Kind.SERVICE: {2: Kind.METHOD},
}
"""The descriptors within a descriptor, by field number."""


class Descriptor(NamedTuple):
    """A descriptor; ``values`` are numbers and bytes by field number, of several the last one."""

    kind: Kind
    name: str
    values: Mapping[int, Any]
    parts: tuple[Descriptor, ...]


class ProtoFile(NamedTuple):
    """A .proto file, which imports no others; ``data`` is its serialized FileDescriptorProto."""

    path: str
    data: bytes
    symbols: Mapping[str, Descriptor]
    """All that it declares, by full name."""


@cache
def load_files() -> tuple[ProtoFile, ...]:
    """Parse the files, once in a process: it takes 4 ms."""
    files = []
    reader = WireReader(_FILES)
    while reader.next_tag():
        data = bytes(reader.read_view())
        symbols: dict[str, Descriptor] = {}
        path = _read(Kind.FILE, data, "", symbols).name
        files.append(ProtoFile(path, data, symbols))
    return tuple(files)


def find_symbol(full_name: str) -> Descriptor:
    """Return what has a name; raises KeyError."""
    for file in load_files():
        if full_name in file.symbols:
            return file.symbols[full_name]
    raise KeyError(full_name)


def text_of(value: Buffer) -> str:
    """Return the text of a value."""
    return str(value, "utf-8")


def _read(kind: Kind, data: Buffer, scope: str, symbols: dict[str, Descriptor]) -> Descriptor:
    """Read a descriptor with its parts, and add all with their full names."""
    values: dict[int, Any] = {}
    parts: list[tuple[Kind, Buffer]] = []
    kinds = _PARTS.get(kind, {})
    reader = WireReader(data)
    while tag := reader.next_tag():
        number = tag >> 3
        value: Any = reader.read_view() if tag & 7 == LENGTH else reader.read_varint()
        values[number] = value
        if number in kinds:
            parts.append((kinds[number], value))
    name = text_of(values[_NAME])
    full_name = f"{scope}.{name}"
    inner = text_of(values[_PACKAGE]) if kind is Kind.FILE else full_name
    if kind is Kind.ENUM:
        inner = scope  # its values are beside it
    read = tuple(_read(part, view, inner, symbols) for part, view in parts)
    descriptor = Descriptor(kind, name, values, read)
    if kind is not Kind.FILE:
        symbols[full_name] = descriptor
    return descriptor
