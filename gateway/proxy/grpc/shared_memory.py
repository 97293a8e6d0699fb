"""ModelInfer messages that pass to a server through shared memory; their start alone is read.

All others pass as they came: small ones whose outputs are small or of no certain size, compressed
ones, those with typed contents, with strings or with regions of the client, and those that have
more after their raw contents than the names of a model that their route has appended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote

from gateway.codec.grpc.shared_memory import (
    MAX_START,
    ContentsReader,
    SharedMessage,
    find_contents,
    read_sharable,
)
from gateway.codec.v2.shared_memory import RequestData, largest_output_size
from gateway.errors import GatewayError
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.framing import PREFIX_SIZE, first_message_size
from gateway.protocol.grpc.headers import ACCEPT_ENCODING
from gateway.protocol.grpc.model_scanner import ModelScanner
from gateway.protocol.grpc.wire import Buffer, WireError, bytes_field
from gateway.protocol.messages import InferRequest
from gateway.protocol.operations import Operation
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import Chunks, prepend
from gateway.proxy.destination import Destination
from gateway.proxy.infer.convert_request import fetched_metadata, shared_tensors
from gateway.upstream.shared_memory import NOT_SHARED
from gateway.upstream.transport import HeaderLines, SentBody


def without_encodings(headers: HeaderLines) -> HeaderLines:
    """Return the headers of a call whose response must not be compressed, as it is read."""
    return tuple(field for field in headers if field[0].lower() != ACCEPT_ENCODING)


def share_buffered(
    body: bytes, operation: Operation, destination: Destination
) -> SharedMessage | None:
    """Return the message of a body as it goes through shared memory; None if it does not."""
    position = _find_contents(body, operation, destination)
    read = None if not position else _read_start(body[:position], operation, destination)
    if read is None:
        return None
    request, start, ending = read
    contents = memoryview(body)[position:]
    try:
        data = list(ContentsReader(request, ending).feed(contents))
    except GatewayError:
        return None  # the server says what is wrong
    contents = contents[: len(contents) - len(ending)]
    return _share(request, start + ending, data, [contents], operation, destination)


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
    read = None if not position else _read_start(start[:position], operation, destination)
    whole = prepend(pieces, body)
    if read is None or not position:
        return whole, None
    request, before, ending = read
    data = _read_data(ContentsReader(request, ending), prepend(pieces, body), position)
    shared = _share(request, before + ending, data, None, operation, destination)
    if shared is None or shared.input_size >= destination.upstream.min_shared_bytes:
        return whole, shared
    size, limits = first_message_size(start) - PREFIX_SIZE, destination.limits
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
    if start[0] or not _may_share(first_message_size(start) - PREFIX_SIZE, operation, destination):
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
    min_bytes = destination.upstream.min_shared_bytes
    if size >= min_bytes or min_bytes == NOT_SHARED:
        return min_bytes != NOT_SHARED
    model = fetched_metadata(operation, destination)
    return model is not None and largest_output_size(model, size) >= min_bytes


def _read_start(
    body_start: bytes, operation: Operation, destination: Destination
) -> tuple[InferRequest, bytes, bytes] | None:
    """Read what precedes the raw contents; return the request, that, and what follows them.

    None if it does not go through shared memory.
    """
    start, size, limits = (
        body_start[PREFIX_SIZE:],
        first_message_size(body_start) - PREFIX_SIZE,
        destination.limits,
    )
    caps = limits.max_inference_header_bytes, limits.max_tensors
    try:
        for ending in _endings(start, operation):
            request = read_sharable(start, size - len(ending), *caps)
            if request is not None:
                return request, start, ending
    except GatewayError:
        pass  # the server says what is wrong
    return None


def _endings(start: bytes, operation: Operation) -> Iterator[bytes]:
    """Yield what may follow the raw contents: nothing, or the names that a route has appended.

    It has if the message begins with other names than those of its operation.
    """
    yield b""
    scanner = ModelScanner((fields.MODEL_NAME >> 3,), fields.MODEL_VERSION >> 3)
    scanner.feed(start)
    model, version = unquote(operation.model or ""), unquote(operation.version or "")
    if scanner.model != (model, version):
        renamed = bytes_field(fields.MODEL_NAME, model.encode())
        yield renamed
        yield renamed + bytes_field(fields.MODEL_VERSION, version.encode())


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


async def _read_data(reader: ContentsReader, body: Chunks, position: int) -> Chunks:
    """Yield the data of the raw contents, which begin at a position of the body."""
    async for piece in body:
        for part in reader.feed(memoryview(piece)[position:]):
            yield part
        position = max(0, position - len(piece))
