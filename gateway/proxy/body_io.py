"""Moves bodies between client and server: in chunks, counted, and within the deadline.

Requests and responses that are not converted pass through untouched, streamed in both directions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from multidict import CIMultiDict

from gateway.codec.json.body_checks import NestingCheck
from gateway.codec.response_form import ResponseForm
from gateway.codec.v2.tensor_check import (
    BodyEnd,
    NoTensorsError,
    TensorCheck,
    last_byte,
    tensor_check,
)
from gateway.errors import (
    ErrorKind,
    GatewayError,
    ServerName,
    bad_request,
    name_server_in_errors,
    strip_tracebacks,
)
from gateway.protocol.grpc.framing import MessageReader
from gateway.protocol.messages import ALL_BINARY, OutputEncoding, may_name_sequence
from gateway.protocol.operations import QUERIES, OperationKind
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.attempts.retry import read_start, send_call
from gateway.proxy.body_chunks import Chunks as Chunks
from gateway.proxy.body_chunks import ResponseChunks, write_chunks
from gateway.proxy.destination import Destination
from gateway.proxy.headers import end_to_end, with_body
from gateway.proxy.interfaces import Call, ClientRequest, ClientResponse
from gateway.proxy.server_dialect import headers_with_type
from gateway.sizes import CONVERT_CHUNK
from gateway.system.time_slices import split
from gateway.upstream.content_decoding import decode_response
from gateway.upstream.transport import Body, UpstreamRequest, UpstreamResponse

_MIN_PIECE = 4 * 1024
"""Bytes of a body that a reader gets at least, but for the last."""

_Converted = TypeVar("_Converted")


class ClientBody:
    """Reads a client's body in pieces of the size that the reader wants.

    ``size_cap`` is in bytes. Raises GatewayError: 413 over the cap, 400 for a broken body.
    """

    def __init__(self, request: ClientRequest, size_cap: int, deadline: Deadline) -> None:
        self.size = request.content_length
        """Bytes of the whole body, None if it is chunked."""
        self._size_cap = size_cap
        self._deadline = deadline
        self._request = request
        self._chunk: bytes | memoryview = b""
        self._position = 0
        self._received = 0
        self._failure: GatewayError | None = None
        self._check_size(self.size or 0)

    async def read(self, max_size: int = CONVERT_CHUNK) -> bytes | memoryview:
        """Return the next bytes, at most ``max_size``; empty at the end of the body."""
        if self._failure is not None:
            raise self._failure
        if self._position == len(self._chunk):
            await self._next_chunk()
        piece = self._chunk[self._position : self._position + max_size]
        self._position += len(piece)
        return piece

    async def read_joined(self, max_size: int) -> bytes | memoryview:
        """Return the next bytes as ``read`` does, but join pieces of less than 4 KiB.

        A client may send a byte at a time. Readers that wait for the end of something would copy
        what they have for each. An error is raised after the pieces before it, which may be invalid
        themselves: the error that the client gets does not depend on the size of its pieces.
        """
        piece = await self.read(max_size)
        least = min(max_size, _MIN_PIECE)
        if not piece or len(piece) >= least:
            return piece
        joined = bytearray(piece)
        try:
            while len(joined) < least and (piece := await self.read(max_size - len(joined))):
                joined += piece
        except GatewayError as error:
            self._failure = strip_tracebacks(error)
        return bytes(joined)

    async def read_all(self, reservation: Reservation) -> bytes:
        """Return the whole body, which must have a size; it can be read again afterwards.

        Raises GatewayError (503) if too much is buffered.
        """
        await self._next_chunk()
        reservation.grow(len(self._chunk))
        if len(self._chunk) != self.size:
            pieces = [self._chunk]
            while self._chunk:
                await self._next_chunk()
                reservation.grow(len(self._chunk))
                pieces.append(self._chunk)
            self._chunk = b"".join(pieces)
        self._chunk = bytes(self._chunk)
        return self._chunk

    async def read_exactly(self, size: int) -> Chunks:
        """Yield pieces of ``size`` bytes in all; raises GatewayError (400) if the body ends."""
        while size:
            piece = await self.read(size)
            if not piece:
                raise bad_request(
                    f"the body is {size} bytes shorter than its inference header declares"
                )
            size -= len(piece)
            yield piece

    async def read_rest(self) -> Chunks:
        """Yield the rest of the body."""
        while piece := await self.read(self._size_cap):
            yield piece

    async def _next_chunk(self) -> None:
        self._chunk = await self._request.read_within(self._deadline)
        self._position = 0
        self._received += len(self._chunk)
        self._check_size(self._received)

    def _check_size(self, size: int) -> None:
        if size > self._size_cap:
            raise GatewayError(
                ErrorKind.TOO_LARGE,
                f"the request is larger than {self._size_cap} bytes (limits.max_request_bytes)",
            )


async def write(response: ClientResponse, data: bytes | memoryview, deadline: Deadline) -> None:
    """Write to the client, which is expected to read."""
    deadline.expect_client()
    await response.write(data)


async def relay_chunks(chunks: Chunks, response: ClientResponse, deadline: Deadline) -> None:
    """Write a body to the client chunk by chunk, and end the response."""
    await write_chunks(chunks, response, deadline)
    await response.finish()


async def slices(chunks: Chunks, size: int, scheduler: ConversionScheduler) -> Chunks:
    """Yield a body in slices of at most ``size`` bytes, with a time slice after each."""
    async for chunk in chunks:
        for piece in split(chunk, size):
            yield piece
            await scheduler.next_slice()


async def stream(pieces: Iterable[bytes | memoryview]) -> Chunks:
    """Yield the pieces of a buffered body."""
    for piece in pieces:
        yield piece


async def prepend(first: Sequence[bytes | memoryview], chunks: Chunks) -> Chunks:
    """Yield the first chunks, then the others."""
    for chunk in first:
        yield chunk
    async for chunk in chunks:
        yield chunk


async def read_first(
    chunks: Chunks, size: int, reservation: Reservation | None = None
) -> list[bytes | memoryview]:
    """Read the first chunks, ``size`` bytes or more if there are so many."""
    first: list[bytes | memoryview] = []
    while size > 0 and (chunk := await anext(chunks, b"")):
        first.append(chunk)
        size -= len(chunk)
        if reservation is not None:
            reservation.grow(len(chunk))
    return first


async def feed_each(
    chunks: AsyncIterable[bytes | memoryview], feed: Callable[[bytes | memoryview], None]
) -> Chunks:
    """Yield a body, each chunk once a check was fed with it; raises what the check raises."""
    async for chunk in chunks:
        feed(chunk)
        yield chunk


async def coalesce(chunks: AsyncIterable[bytes | memoryview]) -> Chunks:
    """Yield a body in pieces of at least one chunk, but for the last; large ones are not copied."""
    waiting = bytearray()
    async for chunk in chunks:
        if not waiting and len(chunk) >= CONVERT_CHUNK:
            yield chunk
            continue
        waiting += chunk
        if len(waiting) >= CONVERT_CHUNK:
            joined = bytes(waiting)
            waiting.clear()
            yield joined
    if waiting:
        yield bytes(waiting)


async def buffer_chunks(
    chunks: AsyncIterable[bytes | memoryview],
    reservation: Reservation,
    cap: int,
    too_large: Callable[[int], GatewayError],
) -> list[bytes]:
    """Buffer a body; raises ``too_large(cap)`` above ``cap`` bytes, and GatewayError (503).

    Small pieces are joined and views are copied: each piece of a byte would take dozens, and a
    memoryview pins its whole slab.
    """
    buffered: list[bytes] = []
    size = 0
    async for chunk in coalesce(chunks):
        size += len(chunk)
        if size > cap:
            raise too_large(cap)
        reservation.grow(len(chunk))
        buffered.append(bytes(chunk))
    return buffered


def too_large_to_buffer(what: str, cap: int) -> GatewayError:
    """Return the error of a request of ``what`` kind that is too large to be buffered."""
    return GatewayError(
        ErrorKind.TOO_LARGE,
        f"{what} is buffered, and is larger than {cap} bytes (limits.max_buffered_body_bytes)",
    )


async def read_messages(
    chunks: Chunks,
    reader: MessageReader,
    reservation: Reservation,
    decompress: Callable[[bytes], Awaitable[bytes | memoryview]],
) -> Chunks:
    """Yield the messages of a gRPC stream as they arrive; only the last one is reserved.

    Raises GatewayError for what the reader refuses, and as ``decompress`` does.
    """
    message = bytearray()
    async for chunk in chunks:
        reader.feed(chunk)
        while (piece := reader.next_piece()) is not None:
            message += piece.data
            reservation.resize(len(message))
            if piece.ends:
                data = bytes(message)
                message.clear()
                yield await decompress(data) if piece.is_compressed else data
    reader.end()


async def convert_message(size: int, convert: Callable[..., _Converted], *args: Any) -> _Converted:
    """Convert a buffered message of ``size`` bytes; a large one in a thread, beside other calls."""
    if size <= CONVERT_CHUNK:
        return convert(*args)
    return await asyncio.to_thread(convert, *args)


async def passthrough(
    call: Call, target: str | None = None, inference: OperationKind | None = None
) -> None:
    """Pass a request to a server and the response back; ``target`` replaces the request's own.

    With a ``target`` any server gets it, whatever models it has. If the request infers,
    ``inference`` is its kind; then a response without tensors raises GatewayError (502).
    """
    request, destination, deadline = call.request, call.destination, call.deadline
    body = ClientBody(request, destination.limits.max_request_bytes, deadline)
    dialect = destination.upstream.dialect_state.dialect
    limits_chunks = dialect is None or dialect.limits_chunks
    headers = await headers_with_type(request, destination.upstream, deadline)
    with call.reserve() as reservation:
        checked = await checked_body(call, body, reservation, limits_chunks=limits_chunks)
        upstream_request = UpstreamRequest(
            request.method,
            target or request.target,
            headers,
            checked,
            is_idempotent=_is_idempotent(call, checked),
        )
        async with send_call(call, upstream_request, to_any=target is not None) as upstream_call:
            received, server = upstream_call.response, upstream_call.server
            if call.response.is_grpc:  # the gateway reads it
                ratio = destination.limits.max_decompression_ratio
                received = decode_response(received, server, ratio)
            relay = ResponseRelay(received, server, call.response, destination, deadline)
            if inference is None:
                await relay_response(relay)
            else:
                await relay_tensors(relay, inference)


def _is_idempotent(call: Call, body: Body) -> bool:
    """Tell whether a server may execute a request twice; see UpstreamRequest.

    A V1 prediction for a V1 server is not parsed. If in doubt, it is not idempotent: its body is
    streamed or compressed, or may write the name of a sequence parameter with escapes.
    """
    if call.operation.kind in QUERIES:
        return True
    is_predict = call.operation.kind is OperationKind.PREDICT
    if not is_predict or not isinstance(body, tuple) or "Content-Encoding" in call.request.headers:
        return False
    return not any(may_name_sequence(bytes(piece)) for piece in body)


async def checked_body(
    call: Call, body: ClientBody, reservation: Reservation, *, limits_chunks: bool
) -> Body:
    """Return the body to send: None without a body, fully buffered if small, else as it arrives.

    A buffered body can be retried. A chunked body is coalesced if the server ``limits_chunks``.
    Raises GatewayError: 400 for JSON nested too deep, before the server has all of it, and 503 if
    too much is buffered.
    """
    if body.size == 0:
        # A Content-Length of 0 is passed on with an empty body, its absence with none.
        return (b"",) if "Content-Length" in call.request.headers else None
    check = NestingCheck(call.destination.limits.max_json_depth)
    if body.size is not None and body.size <= CONVERT_CHUNK:
        buffered = await body.read_all(reservation)
        check.feed(buffered)
        return (buffered,)
    chunks = feed_each(body.read_rest(), check.feed)
    return coalesce(chunks) if limits_chunks and body.size is None else chunks


@dataclass(frozen=True, slots=True)
class ResponseRelay:
    """A server's response on its way to the client, with the encoding that the client wants.

    It is written in ``form``, from a binary one, or as the protocol says without a form.
    """

    upstream_response: UpstreamResponse
    server: ServerName
    response: ClientResponse
    destination: Destination
    deadline: Deadline
    encoding: OutputEncoding = ALL_BINARY
    form: ResponseForm | None = None

    def reserve(self) -> Reservation:
        """Return a reservation for what is buffered of the response."""
        return self.destination.memory_budget.reserve(self.response.record.reserved)

    async def until_sent(self, relaying: Awaitable[None]) -> None:
        """Relay a response from memory that is another call's later; return once all is sent.

        If that fails, the connection is reset: it must not send what is in the memory then.
        """
        try:
            await relaying
            self.deadline.expect_client()
            await self.response.wait_until_sent()
        except BaseException:
            if self.response.record.response_bytes:
                self.response.abort()
            raise

    def chunks(self) -> Chunks:
        """Yield the body of the server's response as it arrives."""
        return ResponseChunks(self.upstream_response, self.server, self.deadline)

    async def read_all(self) -> bytes:
        """Return the whole body of the server's response."""
        self.deadline.expect_server(self.server)
        body = await self.upstream_response.read()
        if len(body) == self.upstream_response.content_length:
            return bytes(body)
        if not body:
            return b""
        return b"".join((body, *[chunk async for chunk in self.chunks()]))

    async def send_body(self, body: bytes, headers: CIMultiDict[str]) -> None:
        """Send a response that is fully buffered, with the server's status."""
        received = self.upstream_response
        self.deadline.expect_client()
        await self.response.send(received.status, received.reason, headers, body)

    async def start(self, headers: CIMultiDict[str]) -> None:
        """Start the response, with the server's status."""
        received = self.upstream_response
        await self.response.start(received.status, received.reason, headers)


async def relay_response(
    relay: ResponseRelay, chunks: Chunks | None = None, check: TensorCheck | None = None
) -> None:
    """Pass a response to the client as it arrives; ``chunks`` replace its body.

    With a ``check``, it starts once the body has begun, or once a small one is complete. Raises
    GatewayError (502) if the check refuses it, before the client has all of it.
    """
    if check is not None:
        chunks = await _checked_chunks(relay, chunks, check)
    headers = end_to_end(relay.upstream_response.headers)
    size = relay.upstream_response.content_length
    if size is not None and "Content-Length" not in headers:
        headers["Content-Length"] = str(size)  # of chunks that are all there
    await relay.start(headers)
    await relay_chunks(chunks or relay.chunks(), relay.response, relay.deadline)


async def _checked_chunks(
    relay: ResponseRelay, chunks: Chunks | None, check: TensorCheck
) -> Chunks:
    size = relay.upstream_response.content_length
    if chunks is None and size is not None and size <= CONVERT_CHUNK:
        body = await relay.read_all()
        check.check_whole(body)
        return stream((body,))
    chunks, end = await check_start(chunks or relay.chunks(), check, size)
    return check_end(chunks, end, size)


async def check_start(
    chunks: Chunks, check: TensorCheck, size: int | None
) -> tuple[Chunks, BodyEnd]:
    """Return a body of this size, None if it is unknown, and what must hold at its end.

    Raises GatewayError (502) if its start shows that it does not hold its tensors.
    """
    first = await read_first(chunks, check.start_size)
    end = check.check_start(first[0] if len(first) == 1 else b"".join(first), size)
    return prepend(first, chunks), end


async def check_end(chunks: Chunks, end: BodyEnd, size: int | None) -> Chunks:
    """Yield a body; raises GatewayError (502) in place of its last chunk if it breaks off.

    A body of unknown size is complete only at its end: then the error comes after that chunk.
    """
    received, last = 0, b""
    async for chunk in chunks:
        received += len(chunk)
        last = last_byte(chunk) or last
        if received == size:
            end.check(received, last)
        yield chunk
    end.check(received, last)


async def relay_tensors(relay: ResponseRelay, kind: OperationKind) -> None:
    """Pass on the response to a request that infers, and passed untouched, as it arrives.

    Raises GatewayError (502) that names the server if it holds no tensors.
    """
    received = relay.upstream_response
    with name_server_in_errors(relay.server):
        try:
            check = tensor_check(received.status, received.headers, kind)
        except NoTensorsError as error:
            raise await quote_body(error, relay) from None
        await relay_response(relay, check=check)


async def quote_body(error: NoTensorsError, relay: ResponseRelay) -> NoTensorsError:
    """Return the error of a response with the start of its body, if that arrives soon."""
    relay.deadline.expect_server(relay.server)
    start = await read_start(relay.upstream_response)
    return error if start is None else error.quoting(start)


async def relay_rewritten(
    relay: ResponseRelay, chunks: Chunks, rewrite: Callable[[bytes], bytes], cap: int
) -> None:
    """Pass a successful response with its body rewritten; untouched if larger than ``cap``."""
    with relay.reserve() as reservation:
        first = await read_first(chunks, cap + 1, reservation)
        if sum(map(len, first)) <= cap:
            document = rewrite(b"".join(first))
            await relay.send_body(document, with_body(relay.upstream_response.headers, {}))
            return
        await relay.start(end_to_end(relay.upstream_response.headers))
        for chunk in first:
            await write(relay.response, chunk, relay.deadline)
        first.clear()
    await relay_chunks(chunks, relay.response, relay.deadline)
