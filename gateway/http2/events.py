"""What a connection tells of its peer, beside the frames that say all: SETTINGS, GOAWAY."""

from __future__ import annotations

from typing import Final

from gateway.http2.errors import Http2Error
from gateway.http2.hpack import Header, HeaderList
from gateway.http2.stream import Stream


class Event:
    """Something that the peer did."""


class StreamEvent(Event):
    """Something that the peer did on a stream."""

    stream: Stream


class HeadersReceived(StreamEvent):
    """A request or a final response began; ``end_stream`` tells that it has no body.

    A list that is ``too_large`` was not checked, and must be refused.
    """

    def __init__(self, stream: Stream, headers: HeaderList, end_stream: bool) -> None:
        self.stream = stream
        self.headers: Final = headers
        self.end_stream: Final = end_stream


class DataReceived(StreamEvent):
    """A piece of a body came; or ``trailers``, with which the message ended.

    ``size`` is what it counts in flow control. ``Http2Connection.acknowledge`` must be called with
    it once the data are used.
    """

    def __init__(
        self,
        stream: Stream,
        data: bytes | memoryview,
        size: int,
        end_stream: bool,
        trailers: tuple[Header, ...] = (),
    ) -> None:
        self.stream = stream
        self.data: Final = data
        self.size: Final = size
        self.end_stream: Final = end_stream
        self.trailers: Final = trailers


class StreamReset(StreamEvent):
    """A stream ended before its messages were complete; nothing more comes or can be sent.

    ``error`` says why. ``by_peer`` tells that the peer reset it; else the peer broke the protocol,
    and the stream was reset for it.
    """

    def __init__(self, stream: Stream, error: Http2Error, by_peer: bool) -> None:
        self.stream = stream
        self.error: Final = error
        self.by_peer: Final = by_peer


class StreamRefused(Event):
    """A stream was reset that nobody has, as the peer broke the protocol on it, or a limit."""

    def __init__(self, error: Http2Error) -> None:
        self.error: Final = error


class WindowOpened(Event):
    """More data can be sent: on one stream, or on all if ``stream`` is None."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream: Final = stream
