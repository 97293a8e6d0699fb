"""Moves bodies between client and server: in chunks, counted, and within the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any, TypeVar

from gateway.errors import ErrorKind, GatewayError, ServerName, bad_request, strip_tracebacks
from gateway.protocol.grpc.framing import MessageReader
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.sizes import CONVERT_CHUNK
from gateway.upstream.transport import UpstreamResponse

Chunks = AsyncIterator[bytes | memoryview]

_MIN_PIECE = 4 * 1024
"""Bytes of a body that a reader gets at least, but for the last."""

_Converted = TypeVar("_Converted")
_Data = TypeVar("_Data", bytes, memoryview, bytes | memoryview)


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


async def response_chunks(
    response: UpstreamResponse, server: ServerName, deadline: Deadline
) -> Chunks:
    """Yield the body of a server's response as it arrives."""
    while True:
        deadline.expect_server(server)
        chunk = await response.read()
        if not chunk:
            return
        yield chunk


async def write(response: ClientResponse, data: bytes | memoryview, deadline: Deadline) -> None:
    """Write to the client, which is expected to read."""
    deadline.expect_client()
    await response.write(data)


async def relay_chunks(chunks: Chunks, response: ClientResponse, deadline: Deadline) -> None:
    """Write a body to the client chunk by chunk, and end the response."""
    async for chunk in chunks:
        await write(response, chunk, deadline)
    await response.finish()


def split(data: _Data, size: int) -> Iterator[_Data]:
    """Yield data in slices of at most ``size`` bytes."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


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
        for piece in reader.feed(chunk):
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
