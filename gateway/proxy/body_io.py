"""Moves bodies in chunks: counted, in time, and never holding the event loop for long."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.upstream.transport import UpstreamResponse

CHUNK_SIZE = 64 * 1024
"""Bytes converted before other exchanges get their turn."""


class ClientBody:
    """Reads a client's body in pieces of the reader's choice.

    ``size_cap`` is in bytes. Raises GatewayError: 413 over the cap, 400 for a broken body.
    """

    def __init__(self, request: ClientRequest, size_cap: int, deadline: Deadline) -> None:
        self.size = request.content_length
        """Bytes of the whole body, None where it is chunked."""
        self._size_cap = size_cap
        self._deadline = deadline
        self._request = request
        self._chunk: bytes | memoryview = b""
        self._position = 0
        self._received = 0
        self._check_size(self.size or 0)

    async def read(self, most: int = CHUNK_SIZE) -> bytes | memoryview:
        """Give the next bytes, at most so many; none at the end of the body."""
        if self._position == len(self._chunk):
            await self._next_chunk()
        piece = self._chunk[self._position : self._position + most]
        self._position += len(piece)
        return piece

    async def whole(self, holding: Reservation) -> bytes:
        """Give the whole of a body that has a size, which is held; it can be read again.

        Raises GatewayError (503) where too much is held.
        """
        await self._next_chunk()
        holding.more(len(self._chunk))
        if len(self._chunk) != self.size:
            pieces = [self._chunk]
            while self._chunk:
                await self._next_chunk()
                holding.more(len(self._chunk))
                pieces.append(self._chunk)
            self._chunk = b"".join(pieces)
        self._chunk = bytes(self._chunk)
        return self._chunk

    async def read_exactly(self, size: int) -> AsyncIterator[bytes | memoryview]:
        """Yield pieces that make up ``size`` bytes; raises GatewayError (400) if the body ends."""
        while size:
            piece = await self.read(size)
            if not piece:
                raise bad_request(f"the body ends {size} bytes before its header says")
            size -= len(piece)
            yield piece

    async def rest(self) -> AsyncIterator[bytes | memoryview]:
        """Yield what is left of the body."""
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
                f"the request is larger than {self._size_cap} bytes (limits.request_bytes)",
            )


async def joined(pieces: AsyncIterable[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    """Yield a body in pieces of a chunk at least, but for the last."""
    held = bytearray()
    async for piece in pieces:
        if not held and len(piece) >= CHUNK_SIZE:
            yield piece
            continue
        held += piece
        if len(held) >= CHUNK_SIZE:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def kept(pieces: AsyncIterable[bytes | memoryview]) -> AsyncIterator[bytes]:
    """Yield a body that is to be held, in pieces that keep little more memory than they show.

    Each of a byte would take dozens, and a view keeps all of the memory that was read into.
    """
    async for piece in joined(pieces):
        yield bytes(piece)


async def whole_response(response: UpstreamResponse, url: str, deadline: Deadline) -> bytes:
    """Give the whole body of a server's response."""
    deadline.expect_server(url)
    body = await response.read()
    if len(body) == response.content_length:
        return bytes(body)
    pieces = [body]
    while pieces[-1]:
        deadline.expect_server(url)
        pieces.append(await response.read())
    return b"".join(pieces)


async def response_chunks(
    response: UpstreamResponse, url: str, deadline: Deadline
) -> AsyncIterator[bytes | memoryview]:
    """Yield the body of a server's response as it arrives."""
    while True:
        deadline.expect_server(url)
        chunk = await response.read()
        if not chunk:
            return
        yield chunk


async def write(answer: ClientResponse, data: bytes | memoryview, deadline: Deadline) -> None:
    """Write to the client, whose turn it is to read."""
    deadline.expect_client()
    await answer.write(data)
