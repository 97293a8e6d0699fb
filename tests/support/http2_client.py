"""An HTTP/2 client on the h2 package, which can also break the protocol on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    InformationalResponseReceived,
    PingAckReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes

from tests.support.certificates import client_context
from tests.support.peer import Peer
from tests.support.raw_client import TIMEOUT

Headers = Sequence[tuple[str, str]]


@dataclass
class Http2Reply:
    """What was received on a stream so far."""

    interim: list[str] = field(default_factory=list)
    """The statuses of interim responses."""
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    headers_ended_it: bool = False
    """Whether the headers had END_STREAM."""
    trailers: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False
    reset: int | None = None
    """The error code with which the gateway reset the stream."""

    def all(self, name: str) -> list[str]:
        """Return every value of a header."""
        return [value for key, value in self.headers if key == name.lower()]

    def get(self, name: str) -> str | None:
        """Return the value of a header; it must not be there more than once."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} is there {len(values)} times"
        return values[0] if values else None

    @property
    def status(self) -> int:
        """Return the status."""
        return int(self.get(":status") or 0)

    @property
    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)


class _PatientH2(H2Connection):
    """A connection that goes on after GOAWAY: h2 takes it for the end of all streams."""

    def go_on(self) -> None:
        """Send and receive as before."""
        self.state_machine.state = ConnectionState.CLIENT_OPEN

    def _receive_goaway_frame(self, frame: Any) -> Any:
        received = super()._receive_goaway_frame(frame)
        self.go_on()
        return received


class Http2Client(Peer):
    """A connection to the gateway.

    ``reads`` says whether it opens its windows again, ``writes`` whether it sends anything by
    itself, such as acknowledgements.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        config = H2Configuration(
            header_encoding="latin-1",
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.h2 = _PatientH2(config)
        self.reads = True
        self.writes = True
        self.replies: dict[int, Http2Reply] = {}
        self.pings: list[bytes] = []
        self.goaways: list[tuple[int, int, bytes]] = []
        """Last stream id, error code and debug data of each GOAWAY."""
        self.closed = False
        """Whether the gateway has closed the connection."""
        self._news = asyncio.Event()

    def begin(self, **settings: int) -> None:
        """Send the preface and the settings, by their names in lower case."""
        self.h2.local_settings.update(
            {SettingCodes[name.upper()]: value for name, value in settings.items()}
        )
        self.h2.local_settings.acknowledge()
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        """Write what there is to send."""
        if self.writes:
            self._writer.write(self.h2.data_to_send())

    def write(self, data: bytes) -> None:
        """Write any bytes."""
        self._writer.write(data)

    def send_headers(
        self,
        method: str,
        target: str,
        headers: Headers = (),
        *,
        end_stream: bool = False,
        flush: bool = True,
    ) -> int:
        """Send the headers of a request; return its stream's id."""
        stream_id = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":scheme", "http"), (":authority", "localhost")]
        fields = [*pseudo, (":path", target), *headers]
        self.h2.send_headers(stream_id, fields, end_stream=end_stream)
        self.replies[stream_id] = Http2Reply()
        if flush:
            self.flush()
        return stream_id

    async def send_data(self, stream_id: int, data: bytes, *, end_stream: bool = True) -> None:
        """Send data as the gateway's windows allow."""
        position = 0
        while True:
            if self.closed or self._writer.is_closing():
                raise ConnectionResetError("the gateway has closed the connection")
            window = self.h2.local_flow_control_window(stream_id)
            size = min(len(data) - position, window, self.h2.max_outbound_frame_size)
            is_last = position + size == len(data)
            if size or is_last:
                piece = data[position : position + size]
                self.h2.send_data(stream_id, piece, end_stream=end_stream and is_last)
                self.flush()
                await self._writer.drain()
            position += size
            if is_last:
                return
            if not size:
                await self._wait()

    async def start(
        self, method: str, target: str, body: bytes | None = None, headers: Headers = ()
    ) -> int:
        """Send a request that is well-formed; return its stream's id."""
        if body is None:
            return self.send_headers(method, target, headers, end_stream=True)
        fields = (*headers, ("content-length", str(len(body))))
        stream_id = self.send_headers(method, target, fields, flush=False)
        await self.send_data(stream_id, body)
        return stream_id

    async def response(self, stream_id: int) -> Http2Reply:
        """Wait for the end of a response, or for a reset."""
        reply = self.replies[stream_id]
        await self.until(lambda: reply.ended or reply.reset is not None)
        return reply

    async def call(
        self, method: str, target: str, body: bytes | None = None, headers: Headers = ()
    ) -> Http2Reply:
        """Send a request that is well-formed, and read the response."""
        return await self.response(await self.start(method, target, body, headers))

    def reset_stream(self, stream_id: int, code: int = 8) -> None:
        """Cancel a request."""
        self.h2.reset_stream(stream_id, code)
        self.flush()

    def send_goaway(self) -> None:
        """Announce that no more requests follow."""
        self.h2.close_connection()
        self.h2.go_on()
        self.flush()

    def ping(self, data: bytes = b"12345678") -> None:
        """Send a PING."""
        self.h2.ping(data)
        self.flush()

    async def until_processed(self) -> None:
        """Wait until the gateway has processed all that was sent: it acknowledges a PING."""
        expected = len(self.pings) + 1
        self.ping()
        await self.until(lambda: len(self.pings) == expected)

    def open_window(self, size: int, stream_id: int | None = None) -> None:
        """Let the gateway send more."""
        self.h2.increment_flow_control_window(size, stream_id)
        self.flush()

    async def until(self, condition: Any) -> None:
        """Wait until a condition holds; fails if the connection ends before."""
        async with asyncio.timeout(TIMEOUT):
            while not condition():
                if self.closed:
                    raise ConnectionResetError("the gateway has closed the connection")
                await self._wait()

    async def until_closed(self) -> None:
        """Wait until the gateway closes the connection."""
        async with asyncio.timeout(TIMEOUT):
            while not self.closed:
                await self._wait()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def receive(self) -> None:
        """Process what comes, until the gateway closes the connection."""
        try:
            while data := await self.reader.read(256 * 1024):
                for event in self.h2.receive_data(data):
                    self._handle(event)
                self.flush()
                self._news.set()
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            self.closed = True
            self._news.set()

    def _handle(self, event: Event) -> None:
        if isinstance(event, PingAckReceived):
            self.pings.append(event.ping_data)
        elif isinstance(event, ConnectionTerminated):
            code = int(event.error_code or 0)
            self.goaways.append((event.last_stream_id or 0, code, event.additional_data or b""))
        elif (stream_id := getattr(event, "stream_id", None)) in self.replies:
            self._handle_reply(event, self.replies[stream_id])

    def _handle_reply(self, event: Event, reply: Http2Reply) -> None:
        if isinstance(event, InformationalResponseReceived):
            reply.interim.append(dict(_text(event.headers))[":status"])
        elif isinstance(event, ResponseReceived):
            reply.headers = _text(event.headers)
            reply.headers_ended_it = event.stream_ended is not None
        elif isinstance(event, DataReceived):
            reply.body += event.data or b""
            if self.reads and event.flow_controlled_length:
                assert event.stream_id is not None
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, TrailersReceived):
            reply.trailers = _text(event.headers)
        elif isinstance(event, StreamEnded):
            reply.ended = True
        elif isinstance(event, StreamReset):
            reply.reset = int(event.error_code or 0)


def _text(headers: Any) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in headers or ()]


@asynccontextmanager
async def open_http2(url: str, own_host: str = "") -> AsyncIterator[Http2Client]:
    """Connect to the gateway at http://host:port or https://host:port, and send nothing yet.

    ``own_host`` is the address of the client.
    """
    scheme, _, authority = url.partition("://")
    host, _, port = authority.rpartition(":")
    context: ssl.SSLContext | None = None
    if scheme == "https":
        context = client_context()
        context.set_alpn_protocols(["h2"])
    own = (own_host, 0) if own_host else None
    streams = await asyncio.open_connection(host, int(port), ssl=context, local_addr=own)
    client = Http2Client(*streams)
    receiving = asyncio.create_task(client.receive())
    try:
        yield client
    finally:
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiving  # raises what h2 found wrong
        with contextlib.suppress(ssl.SSLError):  # data that came after close_notify
            await client.close()


@asynccontextmanager
async def connect_http2(
    url: str, own_host: str = "", **settings: int
) -> AsyncIterator[Http2Client]:
    """Connect to the gateway, and begin with these settings; see ``open_http2``."""
    async with open_http2(url, own_host) as client:
        client.begin(**settings)
        yield client
