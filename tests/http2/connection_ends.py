"""Both ends of an HTTP/2 connection in memory: ours, or that of the ``h2`` package."""

from __future__ import annotations

from abc import ABC, abstractmethod

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode
from gateway.http2.events import (
    DataReceived,
    Event,
    HeadersReceived,
    PingAcknowledged,
    StreamReset,
    TrailersReceived,
)
from gateway.http2.frames import MAX_FRAME_SIZE
from gateway.http2.hpack import Header
from gateway.http2.stream import Stream

Fields = tuple[Header, ...]


class Received:
    """What an end has received on a stream."""

    def __init__(self) -> None:
        self.headers: Fields | None = None
        self.body = bytearray()
        self.trailers: Fields | None = None
        self.ended = False
        self.reset = False
        self.unused: list[int] = []
        """What the pieces that were not acknowledged count in flow control."""


class End(ABC):
    """One end: sends on its streams, and notes what it receives."""

    can_reset_early = True
    """Whether it ignores whatever comes on streams that it has reset."""

    def __init__(self, is_client: bool) -> None:
        self.is_client = is_client
        self.received: dict[int, Received] = {}
        self.sent_resets: set[int] = set()
        self.pings: list[bytes] = []

    def is_alive(self, stream_id: int) -> bool:
        """Whether the end may still send on a stream."""
        got = self.received.get(stream_id)
        return got is not None and not got.reset and stream_id not in self.sent_resets

    def reset(self, stream_id: int) -> None:
        self.sent_resets.add(stream_id)
        self.send_reset(stream_id)

    def acknowledge(self, stream_id: int, count: int) -> None:
        """Use some of the pieces that came."""
        unused = self.received[stream_id].unused
        for size in unused[:count]:
            self.use(stream_id, size)
        del unused[:count]

    def has_negative_window(self, stream_id: int) -> bool:
        return False

    def acknowledge_all(self) -> None:
        for stream_id in self.received:
            self.acknowledge(stream_id, 2**40)

    @property
    @abstractmethod
    def can_open(self) -> bool: ...

    @abstractmethod
    def open(self, fields: Fields, end: bool) -> int: ...

    @abstractmethod
    def send_headers(self, stream_id: int, fields: Fields, end: bool) -> None: ...

    @abstractmethod
    def send_data(self, stream_id: int, data: bytes, end: bool, padding: int) -> int:
        """Send what the windows allow; return how much that was."""

    @abstractmethod
    def send_reset(self, stream_id: int) -> None: ...

    @abstractmethod
    def use(self, stream_id: int, size: int) -> None: ...

    @abstractmethod
    def ping(self, data: bytes) -> None: ...

    @abstractmethod
    def take_output(self) -> bytes: ...

    @abstractmethod
    def receive(self, data: bytes) -> None: ...


class OurEnd(End):
    """Http2Connection."""

    def __init__(self, is_client: bool, sizes: tuple[int, int, int, int]) -> None:
        super().__init__(is_client)
        self.http2 = Http2Connection(is_client, *sizes)
        self.streams: dict[int, Stream] = {}

    @property
    def can_open(self) -> bool:
        return self.http2.can_open_stream

    def open(self, fields: Fields, end: bool) -> int:
        stream = self.http2.open_stream()
        self.streams[stream.id] = stream
        self.received[stream.id] = Received()
        self.http2.send_headers(stream, fields, end)
        return stream.id

    def send_headers(self, stream_id: int, fields: Fields, end: bool) -> None:
        self.http2.send_headers(self.streams[stream_id], fields, end)

    def has_negative_window(self, stream_id: int) -> bool:
        return self.streams[stream_id].send_window < 0

    def send_data(self, stream_id: int, data: bytes, end: bool, padding: int) -> int:
        return self.http2.send_data(self.streams[stream_id], data, end)

    def send_reset(self, stream_id: int) -> None:
        self.http2.reset(self.streams[stream_id], ErrorCode.CANCEL)
        self.received[stream_id].unused.clear()  # it has given the connection's window back

    def use(self, stream_id: int, size: int) -> None:
        self.http2.acknowledge(self.streams[stream_id], size)

    def ping(self, data: bytes) -> None:
        self.http2.ping(data)

    def take_output(self) -> bytes:
        return b"".join(self.http2.take_output())

    def receive(self, data: bytes) -> None:
        self.http2.receive(data)
        while (event := self.http2.next_event()) is not None:
            self._note(event)

    def _note(self, event: Event) -> None:
        if isinstance(event, PingAcknowledged):
            self.pings.append(event.data)
        elif isinstance(event, HeadersReceived):
            assert not event.headers.too_large
            stream_id = event.stream.id
            if not self.is_client:
                self.streams[stream_id] = event.stream
                self.received[stream_id] = Received()
            got = self.received[stream_id]
            assert got.headers is None
            got.headers = event.headers.fields
            got.ended = event.end_stream
        elif isinstance(event, (DataReceived, TrailersReceived, StreamReset)):
            self._note_more(self.received[event.stream.id], event)

    def _note_more(
        self, got: Received, event: DataReceived | TrailersReceived | StreamReset
    ) -> None:
        assert not got.reset
        if isinstance(event, StreamReset):
            assert event.by_peer, event.error
            assert event.stream.is_reset
            got.reset = True
            got.unused.clear()
            return
        assert not got.ended
        assert got.headers is not None
        if isinstance(event, DataReceived):
            got.body += event.data
            got.ended = event.end_stream
            got.unused.append(event.size)
        else:
            got.trailers = event.headers.fields
            got.ended = True


class PeerEnd(End):
    """That of the ``h2`` package."""

    can_reset_early = False

    def __init__(self, is_client: bool) -> None:
        super().__init__(is_client)
        config = h2.config.H2Configuration(client_side=is_client, header_encoding=None)
        self.h2 = h2.connection.H2Connection(config)
        self.acknowledged = False
        """Whether our end has acknowledged its settings; h2 may have only one change pending."""
        self.h2.initiate_connection()

    @property
    def can_open(self) -> bool:
        most = self.h2.remote_settings.max_concurrent_streams
        return self.h2.open_outbound_streams < most

    def open(self, fields: Fields, end: bool) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        self.received[stream_id] = Received()
        self.h2.send_headers(stream_id, fields, end)
        return stream_id

    def send_headers(self, stream_id: int, fields: Fields, end: bool) -> None:
        self.h2.send_headers(stream_id, fields, end)

    def send_data(self, stream_id: int, data: bytes, end: bool, padding: int) -> int:
        sent = 0
        while True:
            window = max(0, self.h2.local_flow_control_window(stream_id))
            most = min(window, self.h2.max_outbound_frame_size)
            pad = padding if padding + 2 <= most else None
            overhead = 0 if pad is None else pad + 1
            piece = data[sent : sent + most - overhead]
            ends = end and sent + len(piece) == len(data)
            if not piece and not ends:
                return sent
            self.h2.send_data(stream_id, piece, ends, pad)
            sent += len(piece)
            if sent == len(data):
                return sent

    def send_reset(self, stream_id: int) -> None:
        # What came still counts in the connection's window, until it is used.
        self.h2.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)

    def use(self, stream_id: int, size: int) -> None:
        if not size:
            return
        self.h2.increment_flow_control_window(size)
        got = self.received[stream_id]
        if not got.ended and not got.reset and stream_id not in self.sent_resets:
            self.h2.increment_flow_control_window(size, stream_id)

    def ping(self, data: bytes) -> None:
        self.h2.ping(data)

    def change_settings(self, settings: dict[int, int]) -> None:
        codes = h2.settings.SettingCodes
        self.acknowledged = False
        # h2 would apply it only to what it receives after the data with the acknowledgement.
        largest = settings.get(MAX_FRAME_SIZE, 0)
        self.h2.max_inbound_frame_size = max(self.h2.max_inbound_frame_size, largest)
        self.h2.update_settings({codes(code): value for code, value in settings.items()})

    def take_output(self) -> bytes:
        return self.h2.data_to_send()

    def receive(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self._note(event)

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.PingAckReceived):
            self.pings.append(event.ping_data)
        elif isinstance(event, h2.events.SettingsAcknowledged):
            self.acknowledged = True
        elif isinstance(event, h2.events.RequestReceived):
            self.received[event.stream_id] = Received()
            self.received[event.stream_id].headers = _fields(event.headers)
        else:
            self._note_message(event)

    def _note_message(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            self.received[event.stream_id].headers = _fields(event.headers)
        elif isinstance(event, h2.events.TrailersReceived):
            self.received[event.stream_id].trailers = _fields(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            got = self.received[event.stream_id]
            got.body += event.data
            got.unused.append(event.flow_controlled_length)
        elif isinstance(event, h2.events.StreamEnded):
            self.received[event.stream_id].ended = True
        elif isinstance(event, h2.events.StreamReset):
            # Its data do not count any more, but do in the connection's window.
            got = self.received[event.stream_id]
            got.reset = True


def _fields(headers: object) -> Fields:
    assert isinstance(headers, list)
    return tuple((bytes(name), bytes(value)) for name, value in headers)
