"""Conforming peers, ours and the ``h2`` package's, in any order of steps and cut of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.http2 import events, frames
from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode
from gateway.http2.frames import (
    HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
)
from gateway.http2.hpack import Header
from gateway.http2.stream import Stream
from tests.support.scale import scaled

Fields = tuple[Header, ...]

CONTENT = bytes(value * 7 % 251 for value in range(400_000))

BIG_FIELDS: Fields = ((b"x-big", b"v" * 25_000),)

WINDOWS = st.sampled_from([0, 1, 300, 20_000, 65_535, 2**20])


# ----------------------------------------------------------------------------------- the ends


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

    @abstractmethod
    def send_reset(self, stream_id: int) -> None: ...

    @abstractmethod
    def use(self, stream_id: int, size: int) -> None: ...


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

    def _note(self, event: events.Event | frames.Frame) -> None:
        if isinstance(event, events.HeadersReceived):
            assert not event.headers.too_large
            stream_id = event.stream.id
            if not self.is_client:
                self.streams[stream_id] = event.stream
                self.received[stream_id] = Received()
            got = self.received[stream_id]
            assert got.headers is None
            got.headers = event.headers.fields
            got.ended = event.end_stream
        elif isinstance(event, (events.DataReceived, events.StreamReset)):
            self._note_more(self.received[event.stream.id], event)

    def _note_more(self, got: Received, event: events.DataReceived | events.StreamReset) -> None:
        assert not got.reset
        if isinstance(event, events.StreamReset):
            assert event.by_peer, event.error
            assert event.stream.is_reset
            got.reset = True
            got.unused.clear()
            return
        assert not got.ended
        assert got.headers is not None
        got.ended = event.end_stream
        if event.trailers:
            got.trailers = event.trailers
        else:
            got.body += event.data
            got.unused.append(event.size)


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


# --------------------------------------------------------------------------------- what they do


class Outgoing:
    """A message that an end sends on a stream, step by step."""

    def __init__(self, size: int, ends_by: str, begun: bool) -> None:
        self.offset = 0
        self.start = 0
        self.size = size
        self.ends_by = ends_by
        self.begun = begun
        self.ended = False
        self.headers: Fields = ()
        self.trailers: Fields | None = None

    def content(self) -> bytes:
        return CONTENT[self.start : self.start + self.offset]


@st.composite
def messages(draw: st.DrawFn) -> tuple[int, str, bool, Fields]:
    """Give a body's size, what ends it, whether its length is told, and some headers."""
    size = draw(
        st.one_of(st.just(0), st.integers(1, 2000), st.sampled_from([16_384, 65_536, 200_000]))
    )
    ends_by = draw(st.sampled_from(["data", "empty", "trailers"] + ["headers"] * (not size)))
    extra = draw(
        st.lists(
            st.tuples(
                st.sampled_from([b"x-a", b"grpc-timeout", b"authorization", b"content-type"]),
                st.sampled_from([b"1", b"application/grpc", b"Bearer abc", b""]),
            ),
            max_size=4,
        ).map(tuple)
    )
    if draw(st.integers(0, 9)) == 0:
        extra += BIG_FIELDS
    return size, ends_by, draw(st.booleans()), extra


class Exchange(RuleBasedStateMachine):
    """Two ends, and the bytes on their way between them."""

    our_sizes = st.tuples(
        st.integers(1, 5),
        st.sampled_from([65_535, 65_536, 150_000]),
        st.sampled_from([65_535, 100_000, 2**20]),
        st.sampled_from([2**14, 50_000]),
    )
    their_settings = st.fixed_dictionaries(
        {
            INITIAL_WINDOW_SIZE: WINDOWS,
            MAX_FRAME_SIZE: st.sampled_from([2**14, 2**14 + 1, 2**18]),
            HEADER_TABLE_SIZE: st.sampled_from([0, 100, 4096, 10_000]),
            MAX_CONCURRENT_STREAMS: st.integers(1, 5),
        }
    )
    client_is_ours: bool

    def __init__(self) -> None:
        super().__init__()
        self.wire: dict[bool, bytearray] = {}
        self.ends: dict[bool, OurEnd | PeerEnd] = {}
        self.outgoing: dict[tuple[bool, int], Outgoing] = {}
        self.pinged: dict[bool, list[bytes]] = {True: [], False: []}
        self.starts = 0
        self.failed = False

    @initialize(data=st.data())
    def connect(self, data: st.DataObject) -> None:
        for is_client in (True, False):
            if is_client is self.client_is_ours:
                self.ends[is_client] = OurEnd(is_client, data.draw(self.our_sizes))
            else:
                self.ends[is_client] = PeerEnd(is_client)
            self.wire[is_client] = bytearray()

    # ---------------------------------------------------------------------------------- steps

    @precondition(lambda self: self.ends[True].can_open)
    @rule(method=st.sampled_from([b"POST", b"POST", b"GET", b"HEAD"]), message=messages())
    def open(self, method: bytes, message: tuple[int, str, bool, Fields]) -> None:
        size, ends_by, tells_length, extra = message
        fields: Fields = (
            (b":method", method),
            (b":scheme", b"http"),
            (b":authority", b"a.test"),
            (b":path", b"/v2/models/m/infer"),
            *_length(size, tells_length),
            *extra,
        )
        client = self.ends[True]
        stream_id = client.open(fields, ends_by == "headers")
        self._begin(True, stream_id, message, fields)

    def _begin(
        self, side: bool, stream_id: int, message: tuple[int, str, bool, Fields], fields: Fields
    ) -> None:
        size, ends_by, _, _ = message
        out = Outgoing(size, ends_by, True)
        out.headers = fields
        out.ended = ends_by == "headers"
        self.starts += 1
        out.start = self.starts * 97 % 100_000
        self.outgoing[side, stream_id] = out

    def _unanswered(self) -> list[int]:
        server = self.ends[False]
        return [
            stream_id
            for stream_id in server.received
            if server.is_alive(stream_id)
            and not ((out := self.outgoing.get((False, stream_id))) and out.begun)
        ]

    @precondition(lambda self: self._unanswered())
    @rule(data=st.data(), status=st.sampled_from([b"200", b"200", b"404", b"204", b"304"]))
    def respond(self, data: st.DataObject, status: bytes) -> None:
        self._respond(data.draw(st.sampled_from(self._unanswered())), status, data.draw(messages()))

    def _respond(
        self, stream_id: int, status: bytes, message: tuple[int, str, bool, Fields]
    ) -> None:
        server = self.ends[False]
        size, ends_by, tells_length, extra = message
        request = server.received[stream_id].headers
        assert request is not None
        length: Fields = _length(size, tells_length)
        if status in (b"204", b"304") or (b":method", b"HEAD") in request:
            size = 0  # but the length of a response to GET may be told
        if status in (b"204", b"304"):
            length = ()  # h2 does not know the rule for 304
        fields: Fields = ((b":status", status), *length, *extra)
        server.send_headers(stream_id, fields, ends_by == "headers")
        self._begin(False, stream_id, (size, ends_by, False, ()), fields)

    @precondition(lambda self: self._unanswered())
    @rule(data=st.data(), status=st.sampled_from([b"100", b"103"]))
    def respond_interim(self, data: st.DataObject, status: bytes) -> None:
        stream_id = data.draw(st.sampled_from(self._unanswered()))
        self.outgoing.setdefault((False, stream_id), Outgoing(0, "", False))
        fields = ((b":status", status), (b"link", b"</a>"))
        self.ends[False].send_headers(stream_id, fields, False)

    def _unfinished(self) -> list[tuple[bool, int]]:
        return [
            key
            for key, out in self.outgoing.items()
            if out.begun
            and not out.ended
            and self.ends[key[0]].is_alive(key[1])
            # h2 takes empty DATA for an error if the window is negative.
            and not (self._peer_is_h2(key[0]) and self.ends[key[0]].has_negative_window(key[1]))
        ]

    def _peer_is_h2(self, side: bool) -> bool:
        return isinstance(self.ends[not side], PeerEnd)

    @precondition(lambda self: self._unfinished())
    @rule(
        data=st.data(),
        size=st.one_of(st.integers(0, 3000), st.sampled_from([16_384, 16_385, 400_000])),
        padding=st.sampled_from([0, 0, 1, 255]),
    )
    def send(self, data: st.DataObject, size: int, padding: int) -> None:
        self._send(data.draw(st.sampled_from(self._unfinished())), size, padding)

    def _send(self, key: tuple[bool, int], size: int, padding: int) -> None:
        side, stream_id = key
        end, out = self.ends[side], self.outgoing[key]
        left = out.size - out.offset
        size = min(size, left)
        place = out.start + out.offset
        ends = size == left and out.ends_by in ("data", "headers")
        if left or ends:
            sent = end.send_data(stream_id, CONTENT[place : place + size], ends, padding)
            assert sent <= size
            out.offset += sent
            out.ended = ends and sent == size
        elif out.ends_by == "empty":
            end.send_data(stream_id, b"", True, 0)
            out.ended = True
        else:
            out.trailers = ((b"grpc-status", b"0"), (b"x-t", b"%d" % (stream_id % 3)))
            end.send_headers(stream_id, out.trailers, True)
            out.ended = True

    def _resettable(self) -> list[tuple[bool, int]]:
        """Give streams that are not closed for the end that resets them."""
        return [
            (side, stream_id)
            for side, end in self.ends.items()
            for stream_id, got in end.received.items()
            if end.is_alive(stream_id)
            and (end.can_reset_early or self._may_be_reset_by_h2(side, stream_id))
            and not (
                got.ended
                and (out := self.outgoing.get((side, stream_id))) is not None
                and out.ended
            )
        ]

    def _may_be_reset_by_h2(self, side: bool, stream_id: int) -> bool:
        """Whether h2 copes with what may still come on a stream that it has reset."""
        if side:
            return self.ends[side].received[stream_id].headers is not None  # interim responses
        return self.outgoing[True, stream_id].ends_by != "trailers"

    @precondition(lambda self: self._resettable())
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        side, stream_id = data.draw(st.sampled_from(self._resettable()))
        self.ends[side].reset(stream_id)

    @rule(side=st.booleans(), size=st.one_of(st.integers(1, 40), st.integers(1, 70_000)))
    def deliver(self, side: bool, size: int) -> None:
        """Let so many bytes of a side arrive."""
        self._collect()
        wire = self.wire[side]
        data = bytes(wire[:size])
        del wire[:size]
        self.failed = True
        self.ends[not side].receive(data)
        self.failed = False

    @rule(side=st.booleans())
    def deliver_all(self, side: bool) -> None:
        self.deliver(side, 2**40)

    def _collect(self) -> None:
        for side, end in self.ends.items():
            self.wire[side] += end.take_output()

    @rule(data=st.data(), count=st.integers(1, 5))
    def acknowledge(self, data: st.DataObject, count: int) -> None:
        keys = [
            (side, stream_id)
            for side, end in self.ends.items()
            for stream_id, got in end.received.items()
            if got.unused
        ]
        if keys:
            side, stream_id = data.draw(st.sampled_from(keys))
            self.ends[side].acknowledge(stream_id, count)

    @rule(side=st.booleans(), data=st.binary(min_size=8, max_size=8))
    def ping(self, side: bool, data: bytes) -> None:
        self.ends[side].ping(data)
        self.pinged[side].append(data)

    @rule(data=st.data())
    def change_settings(self, data: st.DataObject) -> None:
        for end in self.ends.values():
            if isinstance(end, PeerEnd) and end.acknowledged:
                changed = data.draw(self.their_settings)
                if end.is_client:
                    del changed[MAX_CONCURRENT_STREAMS]
                end.change_settings(changed)

    # ---------------------------------------------------------------------------------- laws

    @invariant()
    def check_bodies(self) -> None:
        """Check that what came is the start of what was sent."""
        for (side, stream_id), out in self.outgoing.items():
            got = self.ends[not side].received.get(stream_id)
            if got is not None:
                assert out.content().startswith(got.body)
                assert got.headers in (None, out.headers)

    @invariant()
    def check_windows(self) -> None:
        """Check that no window is lost, and none is too large."""
        for end in self.ends.values():
            if isinstance(end, OurEnd):
                check_windows(end)

    def teardown(self) -> None:
        if self.ends and not self.failed:
            self._finish()
            self._check_end()

    def _finish(self) -> None:
        """End all messages, and let everything arrive."""
        for side in (True, False, True):
            self.deliver_all(side)
        for end in self.ends.values():
            if isinstance(end, PeerEnd):
                assert end.acknowledged
                end.change_settings({INITIAL_WINDOW_SIZE: 65_535})
        while True:
            for end in self.ends.values():
                end.acknowledge_all()
            for stream_id in self._unanswered():
                self._respond(stream_id, b"200", (10, "trailers", True, ()))
            for key in self._unfinished():
                self._send(key, 2**40, 0)
            self._collect()
            if not any(self.wire.values()):
                return
            for side in (True, False):
                self.deliver_all(side)

    def _check_end(self) -> None:
        assert self._unfinished() == []
        for (side, stream_id), out in self.outgoing.items():
            sender, receiver = self.ends[side], self.ends[not side]
            got = receiver.received.get(stream_id)
            if got is None:  # it was refused, or reset before it came
                assert side
                assert not sender.is_alive(stream_id)
                continue
            if got.reset or stream_id in receiver.sent_resets | sender.sent_resets:
                continue
            assert got.headers == out.headers
            assert got.body == out.content()
            assert len(got.body) == out.size
            assert got.trailers == out.trailers
            assert got.ended
        for side, end in self.ends.items():
            if isinstance(end, OurEnd):
                check_released(end)
            else:
                assert end.pings == self.pinged[side]


def check_windows(end: OurEnd) -> None:
    """Check that what may come, what is unused, and what is not told yet, are the target."""
    http2: Any = end.http2
    unused = sum(sum(got.unused) for got in end.received.values())
    window = http2._receive_window
    assert window.unused == unused
    _check_window(window)
    # What is not told is less than what is, or too little for a frame.
    assert _untold(window) < max(window.size, window.target / 8, 1)
    for stream_id, stream in http2.streams.items():
        if stream_id in end.received:
            assert stream.receive_window.unused == sum(end.received[stream_id].unused)
            _check_window(stream.receive_window)


def _check_window(window: Any) -> None:
    assert window.size >= 0
    assert _untold(window) >= 0
    # The peer can go on, or can when more is used.
    assert window.size or window.unused


def _untold(window: Any) -> int:
    untold = window.target - window.unused - window.size
    assert isinstance(untold, int)
    return untold


def check_released(end: OurEnd) -> None:
    """Check that no stream is left, and that all of the window can be used again."""
    http2: Any = end.http2
    assert http2.streams == {}
    assert http2.reader.size == 0
    assert http2._receive_window.unused == 0
    assert http2._receive_window.size > http2._receive_window.target / 2
    for stream in end.streams.values():
        assert stream.closed


def _length(size: int, tells_length: bool) -> tuple[Header, ...]:
    return ((b"content-length", b"%d" % size),) if tells_length else ()


RUN = settings(
    max_examples=scaled(100),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class OurClient(Exchange):
    """Our client, the server of h2."""

    client_is_ours = True


class OurServer(Exchange):
    """The client of h2, our server."""

    client_is_ours = False


OurClient.TestCase.settings = RUN
OurServer.TestCase.settings = RUN

TestOurClient = OurClient.TestCase
TestOurServer = OurServer.TestCase
