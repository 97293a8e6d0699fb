"""ModelInfer messages that pass to a server through shared memory; their start alone is read.

All others pass as they came: small ones whose outputs are small or of no certain size, compressed
ones, those with typed contents, with strings or with regions of the client, and those that have
more after their raw contents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.codec.grpc.shared_memory import (
    MAX_START,
    ContentsReader,
    SharedMessage,
    find_contents,
    read_sharable,
)
from gateway.codec.v2.shared_memory import RequestData, largest_output_size
from gateway.errors import GatewayError
from gateway.protocol.grpc.framing import PREFIX_SIZE
from gateway.protocol.grpc.headers import ACCEPT_ENCODING
from gateway.protocol.grpc.wire import Buffer, WireError
from gateway.protocol.messages import InferRequest
from gateway.protocol.operations import Operation
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import Chunks, prepend
from gateway.proxy.destination import Destination
from gateway.proxy.infer.convert_request import fetched_metadata, shared_tensors
from gateway.upstream.transport import HeaderLines, SentBody


def without_encodings(headers: HeaderLines) -> HeaderLines:
    """Return the headers of a call whose response must not be compressed, as it is read."""
    return tuple(field for field in headers if field[0].lower() != ACCEPT_ENCODING)


def share_buffered(
    body: bytes, operation: Operation, destination: Destination
) -> SharedMessage | None:
    """Return the message of a body as it goes through shared memory; None if it does not."""
    position = _find_contents(body, operation, destination)
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
    body: Chunks, operation: Operation, destination: Destination, reservation: Reservation
) -> tuple[SentBody, SharedMessage | None]:
    """Return a body whose start was read, and its message as it goes through shared memory.

    Either the body or the data of the message may be read on; a message whose outputs alone are
    large is buffered. Raises GatewayError as the body does; the data raise it also for raw contents
    of other sizes than the inputs' shapes tell (400).
    """
    pieces: list[bytes | memoryview] = []
    start, position = b"", None
    while position is None and (piece := await anext(body, b"")):
        pieces.append(piece)
        start += piece[: PREFIX_SIZE + MAX_START - len(start)]
        position = _find_contents(start, operation, destination)
    request = None if not position else _read_start(start[:position], destination)
    whole = prepend(pieces, body)
    if request is None or not position:
        return whole, None
    data = _read_data(request, prepend(pieces, body), position)
    shared = _share(request, start[PREFIX_SIZE:position], data, None, operation, destination)
    policy = destination.upstream.shared_memory
    if shared is None or policy is None or shared.input_size >= policy.min_bytes:
        return whole, shared
    size, limits = _message_size(start), destination.limits
    if size > min(limits.max_buffered_body_bytes, destination.memory_budget.buffers.free):
        return whole, None
    reservation.grow(size)
    buffered = b"".join([piece async for piece in whole])
    return (buffered,), share_buffered(buffered, operation, destination)


def _find_contents(start: bytes, operation: Operation, destination: Destination) -> int | None:
    """Return where the raw contents begin in the start of a body.

    0 if its message does not go through shared memory; None if more of the body has to be read.
    """
    if len(start) < PREFIX_SIZE:
        return None
    if start[0] or not _may_share(_message_size(start), operation, destination):
        return 0
    try:
        position = find_contents(start[PREFIX_SIZE : PREFIX_SIZE + MAX_START])
    except WireError:
        return 0
    if position is None:
        return None if len(start) < PREFIX_SIZE + MAX_START else 0
    return PREFIX_SIZE + position


def _may_share(size: int, operation: Operation, destination: Destination) -> bool:
    """Tell by the size of a message, and by its model, whether tensors may be large enough.

    Small messages mostly have small outputs: then no more is read of them.
    """
    policy = destination.upstream.shared_memory
    if policy is None or size >= policy.min_bytes:
        return policy is not None
    model = fetched_metadata(operation, destination)
    return model is not None and largest_output_size(model, size) >= policy.min_bytes


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
