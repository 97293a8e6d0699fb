"""A gRPC client of one small call: just enough of HTTP/2 and of protobuf for the show."""

import asyncio
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import numpy as np

from gateway.demo.server.tensors import DTYPES, Array

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_FRAME_HEAD: Final = struct.Struct(">HBBBL")  # the length in two parts, kind, flags, stream
_MESSAGE_HEAD: Final = struct.Struct(">BL")  # whether it is compressed, length


class GrpcError(Exception):
    """A call without a response; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class GrpcTensor:
    """A tensor of a message with raw contents."""

    name: str
    datatype: str
    array: Array

    @property
    def summary(self) -> str:
        """Describe the tensor."""
        shape = ",".join(map(str, self.array.shape))
        return f"{self.name}  {self.datatype} [{shape}]  raw contents {self.array.nbytes:,}"


def write_request(model: str, arrays: Mapping[str, Array], datatype: str) -> bytes:
    """Write a ModelInferRequest with raw contents, as tritonclient does."""
    inputs = b"".join(
        _field(
            5,
            _field(1, name.encode())
            + _field(2, datatype.encode())
            + _field(3, b"".join(map(_varint, array.shape))),
        )
        for name, array in arrays.items()
    )
    contents = b"".join(_field(7, array.tobytes()) for array in arrays.values())
    return _field(1, model.encode()) + inputs + contents


def read_tensors(message: bytes, *, outputs: bool) -> list[GrpcTensor]:
    """Read the outputs of a ModelInferResponse, or else the inputs of a ModelInferRequest.

    Raises GrpcError for anything else.
    """
    specs, contents = (5, 6) if outputs else (5, 7)
    try:
        fields = list(_fields(message))
        raw = [value for number, value in fields if number == contents]
        described = [dict(_fields(value)) for number, value in fields if number == specs]
        return [_tensor(spec, data) for spec, data in zip(described, raw, strict=True)]
    except (IndexError, KeyError, ValueError) as error:
        raise GrpcError(f"the message has no tensors ({error!r})") from None


def _tensor(spec: Mapping[int, bytes], data: bytes) -> GrpcTensor:
    datatype = spec[2].decode()
    array = np.frombuffer(data, DTYPES[datatype]).reshape(list(_varints(spec[3])))
    return GrpcTensor(spec[1].decode(), datatype, array)


async def call(url: str, path: str, message: bytes) -> bytes:
    """Send a message of at most 16 KB and return the response, which may have 64 KB.

    Raises GrpcError if there is none. Why a server refuses a call is not read: that is in the
    trailers, which HPACK compresses.
    """
    address = urlsplit(url)
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": address.netloc,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0" + _varint(len(name)) + name.encode() + _varint(len(value)) + value.encode()
        for name, value in fields.items()
    )
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(_PREFACE + _frame(_SETTINGS, 0, 0))
            writer.write(_frame(_HEADERS, _END_HEADERS, 1, block))
            sent = _MESSAGE_HEAD.pack(0, len(message)) + message
            writer.write(_frame(_DATA, _END_STREAM, 1, sent))
            received = await _receive(reader, writer)
        finally:
            writer.close()
    except (OSError, EOFError) as error:
        raise GrpcError(f"no response ({error!r})") from None
    if len(received) < _MESSAGE_HEAD.size:
        raise GrpcError("the response has no message")
    return received[_MESSAGE_HEAD.size :]


async def _receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Read the data of the stream to its end."""
    received = b""
    while True:
        head = await reader.readexactly(_FRAME_HEAD.size)
        high, low, kind, flags, stream = _FRAME_HEAD.unpack(head)
        payload = await reader.readexactly(high << 8 | low)
        if kind == _SETTINGS and not flags & _ACK:
            writer.write(_frame(_SETTINGS, _ACK, 0))
        elif kind in (_RST_STREAM, _GOAWAY):
            raise GrpcError("the call was refused")
        elif kind == _DATA:
            received += payload
        if stream and kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            return received


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _FRAME_HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def _field(number: int, value: bytes) -> bytes:
    """Write a field with a length."""
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Write a number in groups of seven bits, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Read the fields that have a length; the messages of the show have no others."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        if tag & 7 != 2:
            raise ValueError(f"a field of wire type {tag & 7}")
        size, at = _read_varint(message, at)
        yield tag >> 3, message[at : at + size]
        at += size


def _varints(packed: bytes) -> Iterator[int]:
    at = 0
    while at < len(packed):
        value, at = _read_varint(packed, at)
        yield value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number; return it, and where it ends."""
    value, shift = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at
