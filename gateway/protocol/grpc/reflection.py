"""Answers the requests of server reflection: the services of the gateway, and their messages.

The protocol is grpc.reflection.v1, with reflection.proto's messages; v1alpha has the same ones.
``descriptors.binpb`` is a FileDescriptorSet, made of the .proto files by
``tests/support/grpc/generate_descriptors.py``. The fields of descriptors are those of
google/protobuf/descriptor.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.status import GrpcStatus
from gateway.protocol.grpc.wire import (
    LENGTH,
    VARINT,
    Buffer,
    WireError,
    WireReader,
    bytes_field,
    to_int32,
    varint_field,
)
from gateway.protocol.json_errors import quote_value

_DESCRIPTORS: Final = Path(__file__).with_name("descriptors.binpb")

# ServerReflectionRequest.
_HOST: Final = 1 << 3 | LENGTH
_FILE_BY_FILENAME: Final = 3 << 3 | LENGTH
_FILE_CONTAINING_SYMBOL: Final = 4 << 3 | LENGTH
_FILE_CONTAINING_EXTENSION: Final = 5 << 3 | LENGTH
_ALL_EXTENSION_NUMBERS: Final = 6 << 3 | LENGTH
_LIST_SERVICES: Final = 7 << 3 | LENGTH

# ServerReflectionResponse.
_VALID_HOST: Final = 1
_ORIGINAL_REQUEST: Final = 2
_FILE_DESCRIPTOR_RESPONSE: Final = 4
_EXTENSION_NUMBERS_RESPONSE: Final = 5
_LIST_SERVICES_RESPONSE: Final = 6
_ERROR_RESPONSE: Final = 7


def answer_reflection(request: Buffer) -> bytes:
    """Return the response to a ServerReflectionRequest; what is unknown is an error in it.

    Raises GatewayError (400) for invalid protobuf.
    """
    try:
        host, response = _answer(request)
    except WireError as error:
        raise REQUEST.invalid_protobuf(error) from None
    valid_host = bytes_field(_VALID_HOST, host.encode()) if host else b""
    return valid_host + bytes_field(_ORIGINAL_REQUEST, bytes(request)) + response


def _answer(request: Buffer) -> tuple[str, bytes]:
    """Return the host of a request, and the member of its response that answers it."""
    host, last, asked = "", 0, ""
    reader = WireReader(request)
    while tag := reader.next_tag():
        if tag == _HOST:
            host = reader.read_text()
        elif tag == _FILE_CONTAINING_EXTENSION:
            last, asked = tag, _read_extension(reader.enter())
        elif _FILE_BY_FILENAME <= tag <= _LIST_SERVICES and tag & 7 == LENGTH:
            last, asked = tag, reader.read_text()  # of a oneof the last one counts
        else:
            reader.skip(tag)
    return host, _answer_one(last, asked)


def _answer_one(tag: int, asked: str) -> bytes:
    known = _load_descriptors()
    shown = quote_value(asked)
    if tag == _LIST_SERVICES:
        services = [bytes_field(1, bytes_field(1, name.encode())) for name in known.services]
        return bytes_field(_LIST_SERVICES_RESPONSE, b"".join(services))
    if tag == _FILE_BY_FILENAME:
        return _file_response(known.files.get(asked), f"unknown file {shown}")
    if tag == _FILE_CONTAINING_SYMBOL:
        return _file_response(known.files_by_symbol.get(asked), f"unknown symbol {shown}")
    if tag == _FILE_CONTAINING_EXTENSION:
        return _error_response(GrpcStatus.NOT_FOUND, f"unknown extension {shown}")
    if tag == _ALL_EXTENSION_NUMBERS:
        if asked not in known.messages:
            return _error_response(GrpcStatus.NOT_FOUND, f"unknown message {shown}")
        return bytes_field(_EXTENSION_NUMBERS_RESPONSE, bytes_field(1, asked.encode()))
    return _error_response(GrpcStatus.INVALID_ARGUMENT, "the request does not say what it asks for")


def _read_extension(reader: WireReader) -> str:
    """Return the message and the number of an ExtensionRequest."""
    message, number = "", 0
    while tag := reader.next_tag():
        if tag == 1 << 3 | LENGTH:
            message = reader.read_text()
        elif tag == 2 << 3 | VARINT:
            number = to_int32(reader.read_varint())
        else:
            reader.skip(tag)
    return f"{message} {number}"


def _file_response(file: bytes | None, error: str) -> bytes:
    if file is None:
        return _error_response(GrpcStatus.NOT_FOUND, error)
    return bytes_field(_FILE_DESCRIPTOR_RESPONSE, bytes_field(1, file))


def _error_response(code: GrpcStatus, text: str) -> bytes:
    return bytes_field(_ERROR_RESPONSE, varint_field(1, code) + bytes_field(2, text.encode()))


class _Descriptors(NamedTuple):
    """Serialized FileDescriptorProtos; no file imports another one."""

    files: Mapping[str, bytes]
    files_by_symbol: Mapping[str, bytes]
    services: tuple[str, ...]
    messages: frozenset[str]


class _Kind(Enum):
    """What a descriptor describes."""

    FILE = auto()
    MESSAGE = auto()
    ENUM = auto()
    SERVICE = auto()
    OTHER = auto()


_PARTS: Final[Mapping[_Kind, Mapping[int, _Kind]]] = {
    _Kind.FILE: {4: _Kind.MESSAGE, 5: _Kind.ENUM, 6: _Kind.SERVICE},
    _Kind.MESSAGE: {2: _Kind.OTHER, 3: _Kind.MESSAGE, 4: _Kind.ENUM, 8: _Kind.OTHER},
    _Kind.ENUM: {2: _Kind.OTHER},
    _Kind.SERVICE: {2: _Kind.OTHER},
    _Kind.OTHER: {},
}
"""The parts of a descriptor that have a name, by field number: OTHER is, for one, a field."""


@cache
def _load_descriptors() -> _Descriptors:
    files: dict[str, bytes] = {}
    files_by_symbol: dict[str, bytes] = {}
    names: dict[_Kind, list[str]] = {kind: [] for kind in _Kind}
    reader = WireReader(_DESCRIPTORS.read_bytes())
    while reader.next_tag():
        file = bytes(reader.read_view())
        (_, path), *symbols = _names(_Kind.FILE, file, "")
        files[path] = file
        for kind, name in symbols:
            files_by_symbol[name] = file
            names[kind].append(name)
    messages = frozenset(names[_Kind.MESSAGE])
    return _Descriptors(files, files_by_symbol, tuple(names[_Kind.SERVICE]), messages)


def _names(kind: _Kind, descriptor: Buffer, scope: str) -> Iterator[tuple[_Kind, str]]:
    """Yield the name of a file, or the full name of anything in it, then those of its parts."""
    name = package = ""
    parts: list[tuple[_Kind, memoryview]] = []
    reader = WireReader(descriptor)
    while tag := reader.next_tag():
        number = tag >> 3
        if number == 1:
            name = reader.read_text()
        elif number == 2 and kind is _Kind.FILE:
            package = reader.read_text()
        elif number in _PARTS[kind]:
            parts.append((_PARTS[kind][number], reader.read_view()))
        else:
            reader.skip(tag)
    if kind is _Kind.FILE:
        inner = package
    else:
        name = f"{scope}.{name}"
        inner = scope if kind is _Kind.ENUM else name  # values are beside their enumeration
    yield kind, name
    for part, view in parts:
        yield from _names(part, view, inner)
