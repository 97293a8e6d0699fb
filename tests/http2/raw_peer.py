"""A peer of Http2Connection that sends any frames."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode
from gateway.http2.events import Event, HeadersReceived
from gateway.http2.frame_reader import FrameReader
from gateway.http2.frames import (
    PREFACE,
    SETTINGS_ACK,
    Frame,
    HeadersFrame,
    RstStreamFrame,
    encode_data_header,
    encode_headers,
    encode_settings,
)
from gateway.http2.hpack import Decoder, Encoder, Header
from gateway.http2.stream import Stream
from tests.http2.frame_bytes import Told, tell

GET: tuple[Header, ...] = (
    (b":method", b"GET"),
    (b":scheme", b"http"),
    (b":path", b"/"),
    (b":authority", b"a.test"),
)
POST: tuple[Header, ...] = ((b":method", b"POST"), *GET[1:])
OK: tuple[Header, ...] = ((b":status", b"200"),)


class Peer:
    """Sends frames to a connection of ours, and reads its frames."""

    def __init__(
        self,
        is_client: bool = False,
        max_streams: int = 100,
        stream_window: int = 65_535,
        window: int = 65_535,
        max_frame_size: int = 2**14,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a connection of ours, client or server, and introduce both."""
        self.http2 = Http2Connection(
            is_client, max_streams, stream_window, window, max_frame_size, clock
        )
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.reader = FrameReader(2**24 - 1)
        self.opening = b"".join(self.http2.take_output())
        self.events: list[Event | Frame] = []
        hello = encode_settings([]) if is_client else PREFACE + encode_settings([])
        self.send(hello + SETTINGS_ACK)
        self.frames()
        self.events.clear()

    def send(self, *data: bytes) -> None:
        """Let the connection process data; events are noted."""
        self.http2.receive(b"".join(data))
        while (event := self.http2.next_event()) is not None:
            self.events.append(event)

    def headers(
        self, stream_id: int, fields: tuple[Header, ...] = POST, end: bool = False
    ) -> bytes:
        return encode_headers(stream_id, self.encoder.encode(fields), end)

    def request(self, stream_id: int = 1, end: bool = False) -> Stream:
        """Open a stream at our server."""
        self.send(self.headers(stream_id, POST, end))
        event = self.events.pop()
        assert isinstance(event, HeadersReceived)
        return event.stream

    def frames(self) -> list[Frame]:
        """Return the frames that the connection sent."""
        self.reader.feed(b"".join(self.http2.take_output()))
        found = []
        while (each := self.reader.next_frame()) is not None:
            if isinstance(each, HeadersFrame):
                self.decoder.decode(each.block)
            found.append(each)
        return found

    def told(self) -> list[Told]:
        return [tell(each) for each in self.frames()]

    def reset_code(self) -> ErrorCode:
        """Return the code of the only frame, RST_STREAM."""
        (each,) = self.frames()
        assert isinstance(each, RstStreamFrame)
        return ErrorCode(each.error_code)


def data(stream_id: int, content: bytes = b"x", end: bool = False) -> bytes:
    return encode_data_header(stream_id, len(content), end) + content


def open_request(peer: Peer, fields: tuple[Header, ...] = POST, end: bool = True) -> Stream:
    """Send a request from our client."""
    stream = peer.http2.open_stream()
    peer.http2.send_headers(stream, fields, end)
    peer.frames()
    return stream
