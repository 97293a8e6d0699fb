"""What each chunk of a body passes on its way from one side to the other."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable

from gateway.errors import ServerName
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.interfaces import ClientResponse
from gateway.system.sockets.body_stream import RelayedChunks, RelaySteps
from gateway.upstream.transport import UpstreamResponse

Chunks = AsyncIterator[bytes | memoryview]


class ResponseChunks(RelayedChunks):
    """Yields the body of a server's response as it arrives."""

    def __init__(self, response: UpstreamResponse, server: ServerName, deadline: Deadline) -> None:
        self._response = response
        self._server = server
        self._deadline = deadline
        self._refused: bytes | memoryview = b""
        """A chunk that could not be written when it came."""

    def __aiter__(self) -> ResponseChunks:
        """Return itself."""
        return self

    async def __anext__(self) -> bytes | memoryview:
        """Return the next chunk."""
        chunk, self._refused = self._refused, b""
        if not chunk:
            self._expect_server()
            chunk = await self._response.read()
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def relay(self, steps: RelaySteps) -> None:
        """Let each chunk pass these steps; see RelayedChunks."""
        self._expect_server()
        self._refused = await self._response.relay((*steps, self._expect_server))

    def _expect_server(self, chunk: bytes | memoryview = b"") -> None:
        self._deadline.expect_server(self._server)


class WatchedBody:
    """A streamed body that tells when it is begun, and of each chunk; its end is an empty one."""

    def __init__(
        self,
        body: AsyncIterable[bytes | memoryview],
        on_start: Callable[[], None],
        on_chunk: Callable[[bytes | memoryview], None],
    ) -> None:
        self._body = body
        self._on_start = on_start
        self._on_chunk = on_chunk

    def __aiter__(self) -> WatchedChunks:
        """Begin the body, perhaps once more."""
        return WatchedChunks(self._body, self._on_start, self._on_chunk)


class WatchedChunks(RelayedChunks):
    """The chunks of a ``WatchedBody``."""

    def __init__(
        self,
        body: AsyncIterable[bytes | memoryview],
        on_start: Callable[[], None],
        on_chunk: Callable[[bytes | memoryview], None],
    ) -> None:
        self._chunks = aiter(body)
        self._on_start: Callable[[], None] | None = on_start
        self._on_chunk = on_chunk

    def __aiter__(self) -> WatchedChunks:
        """Return itself."""
        return self

    async def __anext__(self) -> bytes | memoryview:
        """Return the next chunk."""
        if self._on_start is not None:
            on_start, self._on_start = self._on_start, None
            on_start()
        async for chunk in self._chunks:
            self._on_chunk(chunk)
            return chunk
        self._on_chunk(b"")
        raise StopAsyncIteration

    async def relay(self, steps: RelaySteps) -> None:
        """Let each chunk pass these steps, and tell of it; see RelayedChunks."""
        if isinstance(self._chunks, RelayedChunks):
            await self._chunks.relay((*steps, self._on_chunk))


async def write_chunks(
    chunks: AsyncIterable[bytes | memoryview], response: ClientResponse, deadline: Deadline
) -> None:
    """Write a body to the client, which is expected to read, chunk by chunk."""
    steps = response.relay_steps()
    async for chunk in chunks:
        deadline.expect_client()
        await response.write(chunk)
        if steps and isinstance(chunks, RelayedChunks):
            await chunks.relay(steps)
