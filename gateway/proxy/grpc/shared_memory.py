"""ModelInfer messages that pass to a server through shared memory; their start alone is read.

All others pass as they came: small and compressed ones, those with typed contents, with strings or
with regions of the client, and those that have more after their raw contents.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from gateway.codec.grpc.shared_memory import (
    MAX_START,
    ContentsReader,
    SharedMessage,
    find_contents,
    read_sharable,
)
from gateway.codec.v2.shared_memory import RequestData
from gateway.errors import GatewayError
from gateway.protocol.grpc.framing import PREFIX_SIZE
from gateway.protocol.grpc.headers import ACCEPT_ENCODING
from gateway.protocol.grpc.wire import Buffer, WireError
from gateway.protocol.messages import InferRequest
from gateway.protocol.operations import Operation
from gateway.proxy.body_io import Chunks, prepend
from gateway.proxy.destination import Destination
from gateway.proxy.infer.convert_request import shared_tensors
from gateway.upstream.transport import HeaderLines


def without_encodings(headers: HeaderLines) -> HeaderLines:
    """Return the headers of a call whose response must not be compressed, as it is read."""
    return tuple(field for field in headers if field[0].lower() != ACCEPT_ENCODING)


def share_buffered(
    body: bytes, operation: Operation, destination: Destination
) -> SharedMessage | None:
    """Return the message of a body as it goes through shared memory; None if it does not."""
    position = _find_contents(body, destination)
    request = None if not position else _read_start(body[:position], destination)
    if request is None:
        return None
    contents = memoryview(body)[position:]
    try:
        data = list(ContentsReader(request).feed(contents))
    except GatewayError:
        return None  # the server says what is wrong
    return _share(request, body[PREFIX_SIZE:position], data, [contents], operation, destination)


async def share_streamed(
    body: AsyncIterator[bytes | memoryview], operation: Operation, destination: Destination
) -> tuple[Chunks, SharedMessage | None]:
    """Return a body whose start was read, and its message as it goes through shared memory.

    Either the body or the data of the message may be read on. Raises GatewayError as the body does;
    the data raise it also for raw contents of other sizes than the inputs' shapes tell (400).
    """
    pieces: list[bytes | memoryview] = []
    start, position = b"", None
    while position is None and (piece := await anext(body, b"")):
        pieces.append(piece)
        start += piece[: PREFIX_SIZE + MAX_START - len(start)]
        position = _find_contents(start, destination)
    request = None if not position else _read_start(start[:position], destination)
    whole = prepend(pieces, body)
    if request is None or not position:
        return whole, None
    data = _read_data(request, prepend(pieces, body), position)
    return whole, _share(request, start[PREFIX_SIZE:position], data, None, operation, destination)


def _find_contents(start: bytes, destination: Destination) -> int | None:
    """Return where the raw contents begin in the start of a body.

    0 if its message does not go through shared memory; None if more of the body has to be read.
    """
    policy = destination.upstream.shared_memory
    if len(start) < PREFIX_SIZE:
        return None
    if policy is None or start[0] or _message_size(start) < policy.min_bytes:
        return 0
    try:
        position = find_contents(start[PREFIX_SIZE : PREFIX_SIZE + MAX_START])
    except WireError:
        return 0
    if position is None:
        return None if len(start) < PREFIX_SIZE + MAX_START else 0
    return PREFIX_SIZE + position


def _message_size(start: bytes) -> int:
    return int.from_bytes(start[1:PREFIX_SIZE], "big")


def _read_start(start: bytes, destination: Destination) -> InferRequest | None:
    limits = destination.limits
    caps = limits.max_inference_header_bytes, limits.max_tensors
    try:
        return read_sharable(start[PREFIX_SIZE:], _message_size(start), *caps)
    except GatewayError:
        return None  # the server says what is wrong


def _share(
    request: InferRequest,
    start: bytes,
    data: RequestData,
    contents: Sequence[Buffer] | None,
    operation: Operation,
    destination: Destination,
) -> SharedMessage | None:
    def make(sizes: Mapping[str, int]) -> SharedMessage:
        return SharedMessage(request, start, data, contents, sizes)

    return shared_tensors(operation, destination, request, make)


async def _read_data(request: InferRequest, body: Chunks, position: int) -> Chunks:
    """Yield the data of the raw contents, which begin at a position of the body."""
    reader = ContentsReader(request)
    async for piece in body:
        for part in reader.feed(memoryview(piece)[position:]):
            yield part
        position = max(0, position - len(piece))
