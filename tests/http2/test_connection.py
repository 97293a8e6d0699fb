"""What a connection makes of frames: RFC 9113, section by section."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http2 import events, frames
from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.frame_reader import FrameReader
from gateway.http2.hpack import Header
from gateway.http2.stream import ReceiveWindow, Stream
from tests.http1.splits import LAW
from tests.http2.frame_bytes import frame, priority
from tests.http2.raw_peer import GET, OK, POST, Peer, data, open_request

CODE = ErrorCode


# ---------------------------------------------------------------------------------- section 3.4


def test_each_end_opens_with_its_settings_and_window() -> None:
    peer = Peer(is_client=True, stream_window=70_000, window=100_000, max_frame_size=20_000)
    assert peer.opening.startswith(frames.PREFACE)
    reader = FrameReader()
    reader.feed(peer.opening[len(frames.PREFACE) :])
    first, second = reader.next_frame(), reader.next_frame()
    assert isinstance(first, frames.SettingsFrame)
    assert dict(first.values) == {
        frames.INITIAL_WINDOW_SIZE: 70_000,
        frames.MAX_FRAME_SIZE: 20_000,
        frames.MAX_HEADER_LIST_SIZE: 65_536,
        frames.ENABLE_PUSH: 0,
    }
    # The window of the connection only grows if that is worth a frame.
    assert second is None
    big = Peer(max_streams=7, window=2**20)
    assert frames.encode_window_update(0, 2**20 - 65_535) in big.opening
    reader.feed(big.opening)
    first = reader.next_frame()
    assert isinstance(first, frames.SettingsFrame)
    assert dict(first.values)[frames.MAX_CONCURRENT_STREAMS] == 7


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "this is not HTTP/2"),
        (frames.PREFACE[:-1] + b"X", "this is not HTTP/2"),
        (frames.PREFACE + frames.encode_ping(b"12345678"), "the first frame is not SETTINGS"),
        (frames.PREFACE + frames.SETTINGS_ACK, "the first frame is not SETTINGS"),
    ],
)
def test_another_start_ends_the_connection(hello: bytes, reason: str) -> None:
    for pieces in ([hello], [hello[i : i + 1] for i in range(len(hello))]):
        http2 = Http2Connection(is_client=False)
        http2.take_output()
        with pytest.raises(Http2Error, match=reason):
            _receive(http2, pieces)
        assert _goaway(http2) == (0, CODE.PROTOCOL_ERROR, reason.encode())


def _receive(http2: Http2Connection, pieces: list[bytes]) -> list[events.Event | frames.Frame]:
    """Return the events of pieces of data."""
    found = []
    for piece in pieces:
        http2.receive(piece)
        while (event := http2.next_event()) is not None:
            found.append(event)
    return found


def _goaway(http2: Http2Connection) -> tuple[int, int, bytes]:
    """Return the GOAWAY that the connection sent last."""
    reader = FrameReader(2**24 - 1)
    reader.feed(b"".join(http2.take_output()))
    last = None
    while (each := reader.next_frame()) is not None:
        last = each
    assert isinstance(last, frames.GoAwayFrame)
    return last.last_stream_id, last.error_code, last.debug_data


def test_nothing_is_read_after_an_error() -> None:
    peer = Peer()
    stream = peer.request()
    peer.request(3)
    with pytest.raises(Http2Error):
        peer.send(frames.encode_window_update(0, 0), data(3))
    assert _goaway(peer.http2)[:2] == (3, CODE.PROTOCOL_ERROR)
    assert peer.http2.streams == {}
    assert stream.is_reset
    assert stream.closed
    peer.events.clear()
    peer.send(peer.headers(5), b"\xff" * 100)
    peer.http2.close(CODE.NO_ERROR)
    peer.http2.send_headers(stream, OK, True)
    assert peer.http2.send_data(stream, b"x", True) == 0
    peer.http2.acknowledge(stream, 0)
    peer.http2.reset(stream, CODE.CANCEL)
    assert (peer.events, peer.frames()) == ([], [])


# -------------------------------------------------------------------------------- section 5.1


def half_closed(peer: Peer) -> None:
    peer.request(end=True)


def closed(peer: Peer) -> None:
    peer.http2.send_headers(peer.request(end=True), OK, True)
    peer.frames()


def reset_by_us(peer: Peer) -> None:
    peer.http2.reset(peer.request(), CODE.CANCEL)
    peer.frames()


def reset_by_peer(peer: Peer) -> None:
    peer.request()
    peer.send(frames.encode_rst_stream(1, CODE.CANCEL))


def idle(peer: Peer) -> None:
    """Stream 1 was never used, nor any other."""


def skipped(peer: Peer) -> None:
    peer.request(5)


DATA = data(1)
TRAILERS = frame(1, 5, 1, b"\x00\x01a\x01b")
RESET = frames.encode_rst_stream(1, CODE.CANCEL)
WINDOW = frames.encode_window_update(1, 10)
ZERO = frames.encode_window_update(1, 0)
PRIORITY = priority(1, 0)
SHORT = frame(2, 0, 1, b"1234")
ITSELF = priority(1, 1)
EVEN = frame(1, 5, 2, b"\x82")  # section 5.1.1

States = list[tuple[Callable[[Peer], None], bytes, str]]

# "" means that the frame is ignored, lower case an error of the stream.
STATES: States = [
    (idle, DATA, "PROTOCOL_ERROR"),
    (idle, RESET, "PROTOCOL_ERROR"),
    (idle, WINDOW, "PROTOCOL_ERROR"),
    (idle, PRIORITY, ""),
    (idle, SHORT, "FRAME_SIZE_ERROR"),
    (idle, ITSELF, "PROTOCOL_ERROR"),
    (skipped, DATA, "PROTOCOL_ERROR"),
    (skipped, TRAILERS, "PROTOCOL_ERROR"),
    (idle, EVEN, "PROTOCOL_ERROR"),
    (half_closed, DATA, "stream_closed"),
    (half_closed, TRAILERS, "stream_closed"),
    (half_closed, RESET, "reset"),
    (half_closed, WINDOW, ""),  # nobody waits for a window that is open
    (half_closed, ZERO, "protocol_error"),
    (half_closed, PRIORITY, ""),
    (half_closed, SHORT, "frame_size_error"),
    (half_closed, ITSELF, "protocol_error"),
    (closed, DATA, "STREAM_CLOSED"),
    (closed, TRAILERS, "STREAM_CLOSED"),
    (closed, RESET, ""),
    (closed, WINDOW, ""),
    (closed, ZERO, "protocol_error"),
    (closed, PRIORITY, ""),
    (reset_by_us, DATA, ""),
    (reset_by_us, TRAILERS, ""),
    (reset_by_us, ZERO, ""),
    (reset_by_us, SHORT, ""),
    (reset_by_us, PRIORITY, ""),
    (reset_by_peer, DATA, "STREAM_CLOSED"),
    (reset_by_peer, TRAILERS, "STREAM_CLOSED"),
    (reset_by_peer, RESET, ""),
    (reset_by_peer, WINDOW, ""),
    (reset_by_peer, PRIORITY, ""),
]


@pytest.mark.parametrize(("state", "sent", "result"), STATES)
def test_frames_in_each_state_of_a_stream(
    state: Callable[[Peer], None], sent: bytes, result: str
) -> None:
    peer = Peer()
    state(peer)
    peer.events.clear()
    peer.frames()
    if result.isupper():
        with pytest.raises(Http2Error) as raised:
            peer.send(sent)
        assert raised.value.code.name == result
        assert raised.value.ends_connection
        return
    peer.send(sent)
    if result == "":
        assert (peer.events, peer.frames()) == ([], [])
    elif result == "reset":
        (event,) = peer.events
        assert isinstance(event, events.StreamReset)
        assert event.by_peer
        assert peer.frames() == []
    else:
        assert peer.reset_code().name == result.upper()
        (event,) = peer.events
        assert isinstance(
            event, events.StreamReset if state is half_closed else events.StreamRefused
        )
        assert event.error.code.name == result.upper()
        assert isinstance(event, events.StreamRefused) or not event.by_peer
    # The connection goes on.
    peer.events.clear()
    assert peer.request(7).id == 7


@pytest.mark.parametrize("sent", [DATA, TRAILERS, RESET, WINDOW, data(2)])
def test_client_refuses_frames_on_streams_that_it_has_not_opened(sent: bytes) -> None:
    peer = Peer(is_client=True)
    with pytest.raises(Http2Error, match="idle stream"):
        peer.send(sent)


# ------------------------------------------------------------------------------- section 5.1.1


def test_our_client_ends_when_stream_ids_are_exhausted() -> None:
    peer = Peer(is_client=True)
    peer.http2._next_id = 2**31 - 1
    assert peer.http2.can_open_stream
    assert open_request(peer).id == 2**31 - 1
    peer.http2.reset(peer.http2.streams[2**31 - 1], CODE.CANCEL)
    assert not peer.http2.can_open_stream


def test_peer_never_hears_of_a_stream_that_ended_before_its_headers() -> None:
    peer = Peer(is_client=True)
    stream = peer.http2.open_stream()
    peer.http2.reset(stream, CODE.CANCEL)
    assert (peer.frames(), peer.http2.streams) == ([], {})
    assert open_request(peer).id == 3


# ------------------------------------------------------------------------------- section 5.1.2


def test_streams_beyond_the_limit_are_refused() -> None:
    peer = Peer(max_streams=2)
    peer.request(1)
    peer.request(3)
    peer.send(peer.headers(5), data(5), peer.headers(5, OK, end=True))
    assert peer.reset_code() == CODE.REFUSED_STREAM
    (refused,) = peer.events
    assert isinstance(refused, events.StreamRefused)
    assert refused.error.reason == "more than 2 streams"
    peer.send(frames.encode_rst_stream(1, CODE.CANCEL))
    assert peer.request(7).id == 7


# --------------------------------------------------------------------------- sections 5.2, 6.9


def test_windows_limit_what_is_sent() -> None:
    peer = Peer()
    peer.send(_initial_window(100))
    first, second = peer.request(1), peer.request(3)
    http2 = peer.http2
    http2.send_headers(first, OK, False)
    assert http2.sendable(first) == 100
    assert http2.send_data(first, b"a" * 150, True) == 100
    assert http2.send_data(first, b"a" * 50, True) == 0
    assert not first.sent_end
    peer.frames()
    peer.events.clear()
    peer.send(frames.encode_window_update(1, 50))
    (event,) = peer.events
    assert isinstance(event, events.WindowOpened)
    assert event.stream is first
    assert http2.send_data(first, b"a" * 50, True) == 50
    (last,) = peer.frames()
    assert isinstance(last, frames.DataFrame)
    assert (last.data, last.end_stream) == (b"a" * 50, True)
    # That of the connection, which other streams have used.
    peer.send(frames.encode_window_update(3, 10**6))
    assert http2.send_data(second, b"b" * 10**6, False) == 65_535 - 150
    assert http2.send_data(second, b"", True) == 0
    assert second.sent_end
    peer.events.clear()
    peer.send(frames.encode_window_update(0, 10))
    (event,) = peer.events
    assert isinstance(event, events.WindowOpened)
    assert event.stream is None


def test_initial_window_changes_windows_of_open_streams_only() -> None:
    peer = Peer()
    stream = peer.request()
    connection_window = 65_535
    assert peer.http2.send_data(stream, bytes(1000), False) == 1000
    peer.events.clear()
    peer.send(_initial_window(400))
    assert [type(event) for event in peer.events] == [frames.SettingsFrame]
    # Section 6.9.2: a window can become negative.
    assert (stream.send_window, peer.http2.sendable(stream)) == (-600, 0)
    assert peer.http2.send_data(stream, b"x", False) == 0
    peer.events.clear()
    peer.send(frames.encode_window_update(1, 600))
    assert peer.events == []
    peer.send(frames.encode_window_update(1, 1))
    assert [type(event) for event in peer.events] == [events.WindowOpened]
    assert peer.http2.sendable(stream) == 1
    peer.events.clear()
    peer.send(_initial_window(10, 10**6))
    assert [type(event) for event in peer.events] == [events.WindowOpened, frames.SettingsFrame]
    assert stream.send_window == 10**6 - 1000 + 601
    assert peer.http2.sendable(stream) == connection_window - 1000


def test_a_window_update_of_what_nobody_sends_wakes_nobody() -> None:
    peer = Peer()
    stream = peer.request()
    peer.http2.send_headers(stream, OK, True)
    peer.send(frames.encode_window_update(1, 10))
    assert peer.events == []


def test_window_overflow() -> None:
    more, most = frames.encode_window_update, 2**31 - 1
    for sent in (more(0, most), more(1, 100) + _initial_window(most)):
        peer = Peer()
        peer.request()
        with pytest.raises(Http2Error) as raised:
            peer.send(sent)
        assert raised.value.ends_connection
        assert raised.value.code == CODE.FLOW_CONTROL_ERROR
    peer = Peer()
    peer.request()
    peer.send(more(1, most))
    assert peer.reset_code() == CODE.FLOW_CONTROL_ERROR


def _initial_window(*sizes: int) -> bytes:
    return frames.encode_settings([(frames.INITIAL_WINDOW_SIZE, size) for size in sizes])


def test_largest_windows_are_allowed() -> None:
    peer = Peer()
    peer.send(frames.encode_window_update(0, 2**31 - 1 - 65_535))
    peer.send(_initial_window(2**31 - 1))
    assert peer.http2.sendable(peer.request()) == 2**31 - 1


def test_data_beyond_windows_are_refused() -> None:
    peer = Peer(window=100_000)
    peer.request(1)
    peer.frames()
    peer.send(*[data(1, bytes(16_000)) for _ in range(5)])
    assert ("RstStreamFrame", 1, CODE.FLOW_CONTROL_ERROR) in peer.told()
    peer.request(3)
    peer.request(5)
    peer.send(*[data(3, bytes(13_000)) for _ in range(5)])
    with pytest.raises(Http2Error, match="connection's window") as raised:
        peer.send(*[data(5, bytes(13_000)) for _ in range(5)])
    assert raised.value.code == CODE.FLOW_CONTROL_ERROR


def test_used_data_open_the_window_of_a_stream_that_goes_on() -> None:
    peer = Peer()
    stream = peer.request()
    peer.send(data(1, bytes(16_000)) * 2 + data(1, bytes(1000)))
    peer.http2.acknowledge(stream, 33_000)
    both = [("WindowUpdateFrame", 0, 33_000), ("WindowUpdateFrame", 1, 33_000)]
    assert peer.told() == both
    peer.send(data(1, bytes(16_000)) * 2 + data(1, bytes(1000), end=True))
    peer.http2.acknowledge(stream, 33_000)
    assert peer.told() == both[:1]


def test_window_of_a_stream_grows() -> None:
    peer = Peer(window=10**6)
    stream = peer.request()
    peer.frames()
    peer.http2.set_stream_window(stream, 200_000)
    assert peer.told() == [("WindowUpdateFrame", 1, 200_000 - 65_535)]
    peer.send(data(1, end=True))
    peer.http2.set_stream_window(stream, 500_000)
    assert peer.told() == []


@LAW
@given(
    st.integers(0, 100_000),
    st.integers(1, 100_000),
    st.lists(st.tuples(st.booleans(), st.integers(0, 50_000)), max_size=60),
)
def test_window_and_unused_data_never_exceed_the_target(
    size: int, target: int, steps: list[tuple[bool, int]]
) -> None:
    target = max(size, target)
    window = ReceiveWindow(size, target)
    allowed, unused = size, 0
    for receives, count in steps:
        if receives:
            count = min(count, allowed)
            assert window.receive(count)
            allowed -= count
            unused += count
            allowed += window.opening()
        else:
            count = min(count, unused)
            unused -= count
            allowed += window.use(count)
        assert (window.size, window.unused) == (allowed, unused)
        untold = target - allowed - unused
        assert 0 <= untold < max(allowed, target / 8, 1)


def test_window_is_opened_when_that_is_worth_a_frame_and_to_the_maximum_at_most() -> None:
    window = ReceiveWindow(65_535, 65_536)
    assert window.receive(32_766)
    assert window.use(32_766) == 0
    assert window.receive(1)
    assert window.use(1) == 32_768
    assert not window.receive(65_537)
    assert ReceiveWindow(100, 2**32).opening() == 2**31 - 1 - 100


def test_padding_opens_windows_without_its_user() -> None:
    peer = Peer()
    peer.request()
    peer.send(frame(0, 8, 1, b"\xff" + bytes(255)) * 1000)
    updates = [each for each in peer.frames() if isinstance(each, frames.WindowUpdateFrame)]
    for stream_id in (0, 1):
        told = sum(each.increment for each in updates if each.stream_id == stream_id)
        assert told > 200_000
    assert peer.events == []


def _send_beyond_the_window(peer: Peer, stream: Stream) -> None:
    stream.receive_window.size = 100
    stream.content_left = -1
    peer.send(data(stream.id, bytes(101)))


def _send_after_a_reset(peer: Peer, stream: Stream) -> None:
    peer.http2.reset(stream, CODE.CANCEL)
    peer.send(data(stream.id, bytes(9000)), data(stream.id, bytes(100), end=True))


FATES: dict[str, Callable[[Peer, Stream], object]] = {
    "our reset": lambda peer, it: peer.http2.reset(it, CODE.CANCEL),
    "reset of the peer": lambda peer, it: peer.send(frames.encode_rst_stream(it.id, CODE.CANCEL)),
    "content-length": lambda peer, it: peer.send(data(it.id, bytes(16_000))),
    "trailers without end": lambda peer, it: peer.send(peer.headers(it.id, ((b"a", b"b"),))),
    "window overflow": lambda peer, it: peer.send(frames.encode_window_update(it.id, 2**31 - 1)),
    "data beyond the window": _send_beyond_the_window,
    "late data": _send_after_a_reset,
}
"""What ends a stream whose data are not used yet."""


@pytest.mark.parametrize("happen", FATES.values(), ids=FATES)
def test_connection_window_never_leaks(happen: Callable[[Peer, Stream], object]) -> None:
    peer = Peer()
    for stream_id in range(1, 40, 2):
        length = (b"content-length", b"%d" % 30_000)
        peer.send(peer.headers(stream_id, (*POST, length)))
        event = peer.events.pop()
        assert isinstance(event, events.HeadersReceived)
        peer.send(data(stream_id, bytes(16_000)))
        happen(peer, event.stream)
        assert event.stream.is_reset
        peer.http2.acknowledge(event.stream, 16_000)  # by whoever still had it
        window = peer.http2._receive_window
        assert window.unused == 0
        assert window.target / 2 < window.size <= window.target
        peer.events.clear()


def test_unused_data_of_a_stream_do_not_stop_others() -> None:
    peer = Peer(stream_window=100_000, window=100_000)
    first, second = peer.request(1), peer.request(3)
    peer.frames()
    told = peer.http2._receive_window.size
    # 44,000 bytes are used: too little for a frame. Then the first stream fills the window.
    for stream, size, used in ((second, 44_000, True), (first, told - 44_000, False)):
        while size:
            piece = min(size, 16_000)
            peer.send(data(stream.id, bytes(piece)))
            if used:
                peer.http2.acknowledge(stream, piece)
            size -= piece
    opened = [each for each in peer.frames() if isinstance(each, frames.WindowUpdateFrame)]
    assert sum(each.increment for each in opened if not each.stream_id) >= 40_000
    assert first.receive_window.unused == told - 44_000


# --------------------------------------------------------------------------------- section 6.5


def test_settings_are_obeyed_and_acknowledged() -> None:
    peer = Peer(is_client=True)
    assert peer.http2.settings_acknowledged
    peer.send(
        frames.encode_settings(
            [(frames.MAX_HEADER_LIST_SIZE, 1000), (frames.HEADER_TABLE_SIZE, 0), (0x99, 5)]
        )
    )
    assert peer.http2.take_output() == [frames.SETTINGS_ACK]
    stream = peer.http2.open_stream()
    peer.http2.send_headers(stream, POST, False)
    (block,) = peer.http2.take_output()
    assert bytes(block)[9] == 0x20  # the size of the table: RFC 7541, section 6.3


def test_server_must_not_enable_push() -> None:
    with pytest.raises(Http2Error, match="push"):
        Peer(is_client=True).send(frames.encode_settings([(frames.ENABLE_PUSH, 1)]))
    Peer(is_client=False).send(frames.encode_settings([(frames.ENABLE_PUSH, 1)]))


# --------------------------------------------------------------------------------- section 6.8


def test_server_shuts_down_in_two_steps() -> None:
    peer = Peer()
    first = peer.request(1)
    peer.http2.announce_shutdown()
    assert peer.told() == [("GoAwayFrame", 0, 2**31 - 1, CODE.NO_ERROR, b"")]
    second = peer.request(3)
    peer.http2.shut_down()
    assert peer.told() == [("GoAwayFrame", 0, 3, CODE.NO_ERROR, b"")]
    peer.http2.shut_down()
    assert peer.told() == []
    # Frames of later streams are ignored, but count in the window of the connection.
    peer.send(peer.headers(5), data(5, bytes(10_000)), frames.encode_rst_stream(5, CODE.CANCEL))
    peer.send(
        peer.headers(7), data(7), peer.headers(7, OK, end=True), frames.encode_window_update(7, 1)
    )
    assert (peer.events, peer.told()) == ([], [])
    assert peer.http2._receive_window.unused == 0
    for stream in (first, second):
        peer.send(data(stream.id, b"x", end=True))
        peer.http2.send_headers(stream, OK, True)
        assert stream.closed
    assert peer.http2.streams == {}
    # The last GOAWAY must not have a larger id than those before.
    peer.frames()
    peer.http2.close(CODE.NO_ERROR, "bye")
    assert peer.told() == [("GoAwayFrame", 0, 3, CODE.NO_ERROR, b"bye")]


def test_goaway_before_any_stream() -> None:
    peer = Peer()
    peer.http2.shut_down()
    assert peer.told() == [("GoAwayFrame", 0, 0, CODE.NO_ERROR, b"")]
    client = Peer(is_client=True)
    open_request(client)
    client.http2.shut_down()
    assert client.told() == [("GoAwayFrame", 0, 0, CODE.NO_ERROR, b"")]
    assert not client.http2.can_open_stream
    client.send(client.headers(1, OK, end=True))
    assert len(client.events) == 1


def test_client_learns_which_requests_were_not_processed() -> None:
    peer = Peer(is_client=True)
    streams = [open_request(peer) for _ in range(3)]
    peer.send(frames.encode_goaway(2**31 - 1, CODE.NO_ERROR))
    (event,) = peer.events
    assert isinstance(event, frames.GoAwayFrame)
    assert peer.http2.going_away
    assert not peer.http2.can_open_stream
    assert not any(stream.is_reset for stream in streams)
    peer.events.clear()
    peer.send(frames.encode_goaway(1, CODE.NO_ERROR, b"later"))
    goaway, *resets = peer.events
    assert isinstance(goaway, frames.GoAwayFrame)
    assert (goaway.last_stream_id, goaway.debug_data) == (1, b"later")
    for event, stream in zip(resets, streams[1:], strict=True):
        assert isinstance(event, events.StreamReset)
        assert event.by_peer
        assert event.stream is stream
        assert event.error.code == CODE.REFUSED_STREAM
    peer.events.clear()
    peer.send(peer.headers(1, OK, end=True))
    assert len(peer.events) == 1
    assert (peer.http2.streams, peer.frames()) == ({}, [])


def test_unknown_codes_are_internal_errors() -> None:
    peer = Peer(is_client=True)
    open_request(peer)
    peer.send(frames.encode_goaway(1, 0x1234), frames.encode_rst_stream(1, 0x99))
    goaway, reset = peer.events
    assert isinstance(goaway, frames.GoAwayFrame)
    assert goaway.error_code == 0x1234
    assert isinstance(reset, events.StreamReset)
    assert reset.error.code == CODE.INTERNAL_ERROR
    assert "error 153" in reset.error.reason


# --------------------------------------------------------------------------------- section 8.1


CONTENT_LENGTHS = [
    (5, [b"hello"], True),
    (5, [b"he", b"llo", b""], True),
    (0, [b""], True),
    (5, [b"hell"], False),
    (5, [b"hello!"], False),
    (5, [b""], False),
    (0, [b"x"], False),
]


@pytest.mark.parametrize("is_client", [False, True])
@pytest.mark.parametrize("by_trailers", [False, True])
@pytest.mark.parametrize(("length", "pieces", "fits"), CONTENT_LENGTHS)
def test_body_must_have_its_content_length(
    length: int, pieces: list[bytes], fits: bool, by_trailers: bool, is_client: bool
) -> None:
    peer = Peer(is_client)
    field = (b"content-length", b"%d" % length)
    if is_client:
        open_request(peer)
    peer.send(peer.headers(1, ((*OK, field) if is_client else (*POST, field))))
    for piece in pieces[:-1]:
        peer.send(data(1, piece))
    peer.send(data(1, pieces[-1], end=not by_trailers))
    if by_trailers:
        peer.send(peer.headers(1, ((b"a", b"b"),), end=True))
    last = peer.events[-1]
    if fits:
        assert isinstance(last, events.DataReceived)
        assert last.end_stream
        assert last.stream.received_end
    else:
        assert isinstance(last, events.StreamReset)
        assert last.error.code == CODE.PROTOCOL_ERROR
        assert frames.RstStreamFrame in [type(each) for each in peer.frames()]


@pytest.mark.parametrize("is_client", [False, True])
def test_message_without_body_must_not_tell_a_length(is_client: bool) -> None:
    peer = Peer(is_client)
    if is_client:
        open_request(peer)
    field = (b"content-length", b"1")
    peer.send(peer.headers(1, (*(OK if is_client else POST), field), end=True))
    assert peer.reset_code() == CODE.PROTOCOL_ERROR
    # A server's user has never heard of the request.
    assert [type(event) for event in peer.events] == [
        events.StreamReset if is_client else events.StreamRefused
    ]


@pytest.mark.parametrize(
    ("method", "status"), [(b"HEAD", b"200"), (b"GET", b"204"), (b"GET", b"304")]
)
def test_responses_that_have_no_body(method: bytes, status: bytes) -> None:
    for pieces, fits in (([], True), ([b""], True), ([b"", b""], True), ([b"x"], False)):
        peer = Peer(is_client=True)
        stream = open_request(peer, ((b":method", method), *GET[1:]))
        fields = ((b":status", status), (b"content-length", b"1000"))
        peer.send(peer.headers(1, fields, end=not pieces))
        for place, piece in enumerate(pieces):
            peer.send(data(1, piece, end=place == len(pieces) - 1))
        assert isinstance(peer.events[0], events.HeadersReceived)
        assert stream.is_reset != fits
        assert stream.closed


def test_trailers_of_a_request_do_not_make_it_one_for_head() -> None:
    peer = Peer(is_client=True)
    stream = open_request(peer, POST, end=False)
    peer.http2.send_headers(stream, ((b":method", b"HEAD"),), True)
    assert not stream.is_head


INVALID_MESSAGES: list[tuple[bool, list[tuple[tuple[Header, ...], bool]]]] = [
    (True, [(((b":status", b"100"),), True)]),
    (True, [(((b":status", b"101"),), False)]),
    (True, [(OK, False), (OK, True)]),
    (True, [(OK, False), (((b":status", b"100"),), False)]),
    (True, [(((b"server", b"x"),), False)]),
    (True, [(OK, False), (((b"a", b"b"),), False)]),
    (False, [(POST, False), (POST, True)]),
    (False, [(POST, False), (((b"a", b"b"),), False)]),
    (False, [(POST, False), (((b"A", b"b"),), True)]),
    (False, [(OK, False)]),
    (False, [((), False)]),
]


@pytest.mark.parametrize(("is_client", "lists"), INVALID_MESSAGES)
def test_malformed_messages_reset_their_stream(
    is_client: bool, lists: list[tuple[tuple[Header, ...], bool]]
) -> None:
    peer = Peer(is_client)
    if is_client:
        open_request(peer)
    for fields, end in lists:
        peer.send(peer.headers(1, fields, end))
    assert peer.reset_code() == CODE.PROTOCOL_ERROR
    is_known = is_client or len(lists) > 1
    assert isinstance(peer.events[-1], events.StreamReset if is_known else events.StreamRefused)
    assert peer.http2.streams == {}


@pytest.mark.parametrize("is_client", [False, True])
def test_headers_that_are_too_large_are_left_to_the_user(is_client: bool) -> None:
    peer = Peer(is_client)
    if is_client:
        open_request(peer)
    large = tuple((b"x-%d" % i, b"v" * 5000) for i in range(20))
    peer.send(peer.headers(1, (*(OK if is_client else POST), *large)))
    (event,) = peer.events
    assert isinstance(event, events.HeadersReceived)
    assert event.headers.too_large
    peer.send(data(1, b"any length", end=True))
    assert event.stream.received_end


def test_trailers_that_are_too_large_reset_their_stream() -> None:
    peer = Peer()
    peer.request()
    peer.send(peer.headers(1, tuple((b"x-%d" % i, b"v" * 5000) for i in range(20)), end=True))
    assert peer.reset_code() == CODE.ENHANCE_YOUR_CALM


def test_connect_opens_a_tunnel() -> None:
    peer = Peer()
    fields = ((b":method", b"CONNECT"), (b":authority", b"a.test:80"), (b"content-length", b"1"))
    peer.send(peer.headers(1, fields), data(1, b"any length"), data(1, b"", end=True))
    assert [type(event) for event in peer.events] == [
        events.HeadersReceived,
        events.DataReceived,
        events.DataReceived,
    ]


def test_empty_message_parts_are_sent_once() -> None:
    peer = Peer()
    stream = peer.request()
    http2 = peer.http2
    http2.send_headers(stream, OK, False)
    assert http2.send_data(stream, b"", False) == 0
    assert http2.send_data(stream, b"", True) == 0
    assert http2.send_data(stream, b"more", True) == 0
    http2.send_headers(stream, OK, True)
    assert [type(each) for each in peer.frames()] == [frames.HeadersFrame, frames.DataFrame]


@pytest.mark.parametrize("is_client", [False, True])
def test_repeated_block_is_refused_where_it_is_not_valid(is_client: bool) -> None:
    """A list that was valid as headers or as trailers is checked anew as the other."""
    peer = Peer(is_client)
    head, trailers = OK if is_client else POST, ((b"te", b"trailers"),)
    for stream_id in range(1, 25, 6):
        for each in range(stream_id, stream_id + 6, 2):
            assert not is_client or open_request(peer).id == each
        peer.send(
            peer.headers(stream_id, head) + peer.headers(stream_id, trailers, end=True),
            peer.headers(stream_id + 2, head) + peer.headers(stream_id + 2, head, end=True),
            peer.headers(stream_id + 4, trailers, end=True),
        )
    refused = (events.StreamReset, events.StreamRefused)
    first, second, *more = [each.error.reason for each in peer.events if isinstance(each, refused)]
    assert "has no place here" in first
    assert "is missing" in second
    assert more == [first, second] * 3
