"""A server of HTTP/2 on the h2 package, which can break the rules wherever a test wants it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingReceived,
    RequestReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes, Settings

from tests.support.certificates import server_context
from tests.support.servers.scripted_server import Connection, Script

Headers = Iterable[tuple[str, str]]

_MAX_WINDOW = 2**31 - 1


@dataclass(eq=False)
class ReceivedStream:
    """What the client has sent on a stream so far."""

    id: int
    headers: list[tuple[str, str]]
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: int | None = None

    @property
    def path(self) -> str:
        """Return the request's :path."""
        return dict(self.headers)[":path"]


class Http2Peer:
    """The server's end of a connection, for a script to play on.

    ``opens_windows=False`` never lets the client send more than the initial windows.
    """

    def __init__(self, connection: Connection, opens_windows: bool = True) -> None:
        self.connection = connection
        # Like this it sends what the script says, valid or not.
        self.h2 = H2Connection(
            H2Configuration(
                client_side=False,
                header_encoding="latin-1",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.streams: list[ReceivedStream] = []
        """The streams in the order in which the client has opened them."""
        self.events: list[Event] = []
        self._opens_windows = opens_windows

    async def start(self, settings: Mapping[SettingCodes, int]) -> None:
        """Send the settings."""
        self.h2.local_settings = Settings(
            client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: 100, **settings}
        )
        self.h2.initiate_connection()
        if self._opens_windows:
            self.h2.increment_flow_control_window(_MAX_WINDOW - 65_535)
        await self.flush()

    async def flush(self) -> None:
        """Send what there is to send."""
        if data := self.h2.data_to_send():
            await self.connection.send(data)

    async def receive(self) -> None:
        """Process the next bytes of the client. Raises IncompleteReadError at their end."""
        data = await self.connection.reader.read(256 * 1024)
        if not data:
            raise asyncio.IncompleteReadError(b"", None)
        for event in self.h2.receive_data(data):
            self.events.append(event)
            self._handle(event)
        await self.flush()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Process bytes of the client until a condition holds."""
        while not condition():
            await self.receive()

    async def stream(self, number: int = 0) -> ReceivedStream:
        """Wait for the headers of a stream, by its number."""
        await self.until(lambda: len(self.streams) > number)
        return self.streams[number]

    async def request(self, number: int = 0) -> ReceivedStream:
        """Wait for a whole request, by its number."""
        stream = await self.stream(number)
        await self.until(lambda: stream.ended)
        return stream

    async def serve_to_end(self) -> None:
        """Process what the client sends until it leaves."""
        try:
            while True:
                await self.receive()
        except asyncio.IncompleteReadError:
            self.connection.left.set()

    async def respond(
        self,
        stream: ReceivedStream,
        body: bytes = b"",
        headers: Headers = (),
        trailers: Headers | None = None,
        end: bool = True,
    ) -> None:
        """Send a response, or with ``end=False`` the start of one."""
        head = [(":status", "200"), *headers]
        is_bare = not body and trailers is None
        self.h2.send_headers(stream.id, head, end_stream=end and is_bare)
        await self.flush()
        if body:
            await self.send(stream, body, end=end and trailers is None)
        if trailers is not None:
            self.h2.send_headers(stream.id, list(trailers), end_stream=True)
            await self.flush()

    async def send(self, stream: ReceivedStream, data: bytes, end: bool = False) -> None:
        """Send data as fast as the client's windows allow."""
        while data:
            size = min(
                self.h2.local_flow_control_window(stream.id), self.h2.max_outbound_frame_size
            )
            if size:
                self.h2.send_data(stream.id, data[:size], end_stream=end and size >= len(data))
                data = data[size:]
                await self.flush()
            else:
                await self.receive()

    async def reset(self, stream: ReceivedStream, code: int) -> None:
        """Reset a stream."""
        self.h2.reset_stream(stream.id, code)
        await self.flush()

    async def go_away(
        self, last_stream_id: int, code: int = ErrorCodes.NO_ERROR, debug_data: bytes = b""
    ) -> None:
        """Send GOAWAY; unlike h2 by itself, go on with the open streams."""
        payload = last_stream_id.to_bytes(4) + int(code).to_bytes(4) + debug_data
        await self.send_frame(7, 0, 0, payload)

    async def send_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Send any frame, valid or not."""
        header = len(payload).to_bytes(3) + bytes([kind, flags]) + stream_id.to_bytes(4)
        await self.connection.send(header + payload)

    def count(self, kind: type[Event]) -> int:
        """Return how many events of a kind there were."""
        return sum(isinstance(event, kind) for event in self.events)

    def _handle(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            assert event.stream_id is not None
            headers = [(str(name), str(value)) for name, value in event.headers or ()]
            self.streams.append(ReceivedStream(event.stream_id, headers))
        elif isinstance(event, DataReceived):
            stream = self._stream(event.stream_id)
            stream.body += event.data or b""
            size = event.flow_controlled_length
            if self._opens_windows and size:
                self.h2.acknowledge_received_data(size, stream.id)
        elif isinstance(event, StreamEnded):
            self._stream(event.stream_id).ended = True
        elif isinstance(event, StreamReset):
            self._stream(event.stream_id).reset = int(event.error_code or 0)

    def _stream(self, stream_id: int | None) -> ReceivedStream:
        return next(stream for stream in self.streams if stream.id == stream_id)


PING = PingReceived
LEFT = ConnectionTerminated

Play = Callable[[Http2Peer], Awaitable[None]]


def http2_script(
    play: Play, settings: Mapping[SettingCodes, int] | None = None, opens_windows: bool = True
) -> Script:
    """Make the script of a ScriptedServer that plays over HTTP/2, with the server's settings."""

    async def script(connection: Connection) -> None:
        peer = Http2Peer(connection, opens_windows)
        await peer.start(settings or {})
        await play(peer)

    return script


def answering(
    body: bytes = b"",
    trailers: Headers | None = None,
    settings: Mapping[SettingCodes, int] | None = None,
    headers: Headers = (),
) -> Script:
    """Make the script that answers each request as soon as it is complete."""

    async def play(peer: Http2Peer) -> None:
        answered = 0
        while True:
            for stream in peer.streams[answered:]:
                if not stream.ended:
                    break
                answered += 1
                await peer.respond(stream, body, headers, trailers)
            else:
                await peer.receive()
                continue
            await peer.receive()

    return http2_script(play, settings)


def http2_tls() -> ssl.SSLContext:
    """Return a server's context that chooses HTTP/2 by ALPN."""
    context = server_context()
    context.set_alpn_protocols(["h2"])
    return context
