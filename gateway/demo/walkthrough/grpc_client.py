"""A gRPC client of one small call."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import numpy as np
from multidict import CIMultiDict

from gateway.demo.server.tensors import DTYPES, Array
from gateway.errors import GatewayError
from gateway.protocol.grpc.framing import PREFIX_SIZE, frame
from gateway.protocol.grpc.wire import LENGTH, WireError, WireReader, bytes_field, varint
from gateway.upstream.address import TcpAddress
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import UpstreamRequest

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"

_CONNECT_TIMEOUT: Final = 5.0  # seconds
_HEADERS: Final = {"Content-Type": "application/grpc", "TE": "trailers"}


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
        bytes_field(
            5,
            bytes_field(1, name.encode())
            + bytes_field(2, datatype.encode())
            + bytes_field(3, b"".join(map(varint, array.shape))),
        )
        for name, array in arrays.items()
    )
    contents = b"".join(bytes_field(7, array.tobytes()) for array in arrays.values())
    return bytes_field(1, model.encode()) + inputs + contents


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
    except (WireError, KeyError, ValueError) as error:
        raise GrpcError(f"the message has no tensors ({error!r})") from None


def _tensor(spec: Mapping[int, bytes], data: bytes) -> GrpcTensor:
    datatype, reader, shape = spec[2].decode(), WireReader(spec[3]), list[int]()
    while reader.position < reader.end:
        shape.append(reader.read_varint())
    array = np.frombuffer(data, DTYPES[datatype]).reshape(shape)
    return GrpcTensor(spec[1].decode(), datatype, array)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Read the fields that have a length; the messages of the show have no others."""
    reader = WireReader(message)
    while tag := reader.next_tag():
        if tag & 7 != LENGTH:
            raise ValueError(f"a field of wire type {tag & 7}")
        yield tag >> 3, bytes(reader.read_view())


async def call(url: str, path: str, message: bytes) -> bytes:
    """Send a message and return the response. Raises GrpcError if there is none."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    endpoint = Http2Endpoint(TcpAddress(address.hostname, address.port), _CONNECT_TIMEOUT)
    body = (frame(len(message)) + message,)
    try:
        request = UpstreamRequest("POST", path, CIMultiDict(_HEADERS), body, is_grpc=True)
        with closing(await endpoint.send(request)) as response:
            received = b""
            while chunk := await response.read():
                received += chunk
            if response.error:
                raise GrpcError(response.error)
    except GatewayError as error:
        raise GrpcError(str(error)) from None
    finally:
        await endpoint.close()
    if len(received) < PREFIX_SIZE:
        raise GrpcError("the response has no message")
    return received[PREFIX_SIZE:]
