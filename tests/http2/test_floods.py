"""What peers attack HTTP/2 connections with, and the limit that ends each attack.

Single frames and header blocks that are too large have their tests beside frame_reader and hpack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice

import pytest

from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.events import StreamReset
from gateway.http2.flood_limits import (
    CONTROL_FRAMES_PER_MESSAGE,
    MAX_CONTROL_FRAMES,
    MAX_RESETS,
    MAX_RESETS_PER_SECOND,
    MAX_TINY_DATA,
    MAX_TINY_DATA_PER_SECOND,
    MAX_TINY_FRAMES,
    TIME_SLICE_WORK,
    TINY_FRAME,
    RateLimit,
)
from gateway.http2.frames import (
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    encode_goaway,
    encode_headers,
    encode_ping,
    encode_rst_stream,
    encode_settings,
    encode_window_update,
)
from gateway.http2.hpack import MAX_FIELDS
from tests.http2.frame_bytes import frame, priority
from tests.http2.raw_peer import OK, POST, Peer, data, open_request
from tests.support.doubles.clock import Clock

CODE = ErrorCode


def sent_until_refused(peer: Peer, attack: Iterator[bytes], most: int) -> int:
    """Return how many steps of an attack the peer gets through; the connection ends then.

    What the connection sends is dropped, as if the peer did not read it.
    """
    passed = 0

    def run() -> None:
        nonlocal passed
        written = 0
        for step in islice(attack, most):
            peer.send(step)
            peer.events.clear()
            passed += 1
            written += sum(len(each) for each in peer.http2.take_output())
            # What waits for a peer that does not read is bounded.
            assert written < 1_000_000

    with pytest.raises(Http2Error) as raised:
        run()
    assert raised.value.ends_connection
    assert raised.value.code == CODE.ENHANCE_YOUR_CALM
    return passed


def streams(step: Callable[[Peer, int], bytes], peer: Peer) -> Iterator[bytes]:
    """Yield what an attack sends on each of its streams."""
    return (step(peer, 2 * number + 1) for number in count())


def rapid_reset(peer: Peer, stream_id: int) -> bytes:
    return peer.headers(stream_id) + encode_rst_stream(stream_id, CODE.CANCEL)


def reset_by_zero_increment(peer: Peer, stream_id: int) -> bytes:
    return peer.headers(stream_id) + encode_window_update(stream_id, 0)


def reset_by_length(peer: Peer, stream_id: int) -> bytes:
    return peer.headers(stream_id, (*POST, (b"content-length", b"0"))) + data(stream_id)


@pytest.mark.parametrize("attack", [rapid_reset, reset_by_zero_increment, reset_by_length])
def test_streams_that_are_opened_and_reset(attack: Callable[[Peer, int], bytes]) -> None:
    """MAX_RESETS, whoever sends RST_STREAM: CVE-2023-44487 and CVE-2025-8671."""
    peer = Peer(clock=Clock().time)
    assert sent_until_refused(peer, streams(attack, peer), 2 * MAX_RESETS) == MAX_RESETS


def test_resets_in_the_long_run() -> None:
    clock = Clock()
    peer = Peer(clock=clock.time)
    attack = streams(rapid_reset, peer)
    for _ in range(3000):
        clock.now += 1 / MAX_RESETS_PER_SECOND
        peer.send(next(attack))
    assert peer.http2.streams == {}
    assert peer.request(9001).id == 9001


CONTROL: dict[str, bytes] = {
    "PING": encode_ping(b"12345678"),
    "SETTINGS": encode_settings([(INITIAL_WINDOW_SIZE, 1), (MAX_FRAME_SIZE, 20_000)]),
    "PRIORITY": priority(99, 0),
    "WINDOW_UPDATE": encode_window_update(0, 1),
    "RST_STREAM of a closed stream": encode_rst_stream(3, 0),
    "GOAWAY": encode_goaway(0, 0),
    "unknown": frame(99, 0, 0, b"abc"),
    "empty DATA": data(1, b""),
    "padding": frame(0, 8, 1, b"\3\0\0\0"),
    "DATA of a reset stream": data(3),
    "HEADERS of a reset stream": frame(1, 5, 3, b"\x88"),
}


@pytest.mark.parametrize("name", CONTROL)
def test_frames_without_a_message(name: str) -> None:
    """MAX_CONTROL_FRAMES: CVE-2019-9512, 9514, 9515, 9518 and others."""
    peer = Peer(clock=Clock().time)
    peer.request(1)
    peer.http2.reset(peer.request(3), CODE.CANCEL)
    done = sent_until_refused(peer, iter(lambda: CONTROL[name], None), 2 * MAX_CONTROL_FRAMES)
    assert MAX_CONTROL_FRAMES - 10 <= done <= MAX_CONTROL_FRAMES


def test_requests_after_goaway_and_interim_responses() -> None:
    """MAX_CONTROL_FRAMES."""
    server = Peer(clock=Clock().time)
    server.request(1)
    server.http2.shut_down()
    requests = streams(lambda peer, stream_id: peer.headers(stream_id + 2), server)
    client = Peer(is_client=True, clock=Clock().time)
    open_request(client)
    interim = iter(lambda: client.headers(1, ((b":status", b"103"),)), None)
    for peer, attack in ((server, requests), (client, interim)):
        done = sent_until_refused(peer, attack, 2 * MAX_CONTROL_FRAMES)
        assert MAX_CONTROL_FRAMES - 10 <= done <= MAX_CONTROL_FRAMES


@pytest.mark.parametrize("body", [b"", b"x"])
def test_frames_that_acknowledge_messages_are_no_flood(body: bytes) -> None:
    """CONTROL_FRAMES_PER_MESSAGE."""
    peer = Peer(clock=Clock().time)
    assert CONTROL_FRAMES_PER_MESSAGE == 4
    for stream_id in range(1, MAX_CONTROL_FRAMES, 2):
        stream = peer.request(stream_id, end=True)
        peer.http2.send_headers(stream, OK, not body)
        peer.http2.send_data(stream, body, True)
        for increment in (encode_window_update(0, 1), encode_ping(b"12345678")):
            peer.send(increment)
        peer.send(encode_ping(b"abcdefgh", ack=True))
        peer.events.clear()
        peer.http2.take_output()
    assert peer.http2.streams == {}


def test_late_frame_in_many_pieces_counts_once() -> None:
    peer = Peer(clock=Clock().time)
    peer.http2.reset(peer.request(1), CODE.CANCEL)
    late = data(1, bytes(12_000))
    assert len(late) > MAX_CONTROL_FRAMES
    for place in range(len(late)):
        peer.send(late[place : place + 1])
    assert peer.events == []


def test_windows_opened_by_one_byte() -> None:
    """MAX_TINY_FRAMES: CVE-2019-9511 and CVE-2019-9517."""
    peer = Peer(clock=Clock().time)
    peer.send(encode_settings([(INITIAL_WINDOW_SIZE, 0)]))
    stream = peer.request()
    http2 = peer.http2
    sent = 0

    def attack() -> Iterator[bytes]:
        nonlocal sent
        while True:
            yield encode_window_update(1, 1)
            sent += http2.send_data(stream, b"x" * 10_000, True)

    assert sent_until_refused(peer, attack(), 2 * MAX_TINY_FRAMES) > MAX_TINY_FRAMES
    # Each of these bytes earns a little.
    assert MAX_TINY_FRAMES <= sent < MAX_TINY_FRAMES * (1 + 2 / TINY_FRAME)


def test_windows_that_run_out_with_a_few_bytes_are_no_flood() -> None:
    peer = Peer(clock=Clock().time)
    stream = peer.request()
    http2 = peer.http2
    for _ in range(3 * MAX_TINY_FRAMES):
        window = http2.sendable(stream)
        assert http2.send_data(stream, bytes(window - 10), False) == window - 10
        assert http2.send_data(stream, bytes(100), False) == 10
        peer.send(encode_window_update(0, window), encode_window_update(1, window))
        peer.events.clear()
        http2.take_output()


def frames_in_a_time_slice(peer: Peer, flood: list[bytes]) -> int:
    """Return how many frames of a flood, which comes at once, are processed in one time slice."""
    peer.http2.begin_time_slice()
    peer.send(*flood)
    unread, count = peer.http2.reader.unread, len(flood)
    while unread >= len(flood[count - 1]):
        count -= 1
        unread -= len(flood[count])
    return count


@pytest.mark.parametrize("name", [*CONTROL, "tiny DATA"])
def test_turn_has_a_bounded_number_of_frames(name: str) -> None:
    """TIME_SLICE_WORK, also for frames that tell nobody anything."""
    peer = Peer(clock=Clock().time)
    peer.request(1)
    peer.http2.reset(peer.request(3), CODE.CANCEL)
    frame = CONTROL.get(name, data(1))
    assert (
        TIME_SLICE_WORK // 2
        < frames_in_a_time_slice(peer, [frame] * (2 * TIME_SLICE_WORK))
        <= TIME_SLICE_WORK
    )
    # The rest is for the next time slices.
    peer.http2.begin_time_slice()
    peer.send()
    peer.http2.begin_time_slice()
    peer.send()
    assert peer.http2.reader.unread == 0


ALL_FIELDS = b"\x82" * (MAX_FIELDS - 1)


@pytest.mark.parametrize(
    ("flood", "most"),
    [
        pytest.param(lambda peer, i: encode_headers(i, ALL_FIELDS, True), 1, id="fields"),
        pytest.param(lambda peer, i: encode_headers(1, ALL_FIELDS, True), 1, id="late fields"),
        pytest.param(lambda peer, i: peer.headers(i, end=True), 45, id="requests"),
        pytest.param(
            lambda peer, i: encode_settings([(INITIAL_WINDOW_SIZE, i)] * 2500), 3, id="settings"
        ),
        pytest.param(
            lambda peer, i: encode_settings([(INITIAL_WINDOW_SIZE, i)]), 40, id="90 windows"
        ),
    ],
)
def test_turn_has_fewer_frames_that_cost_more(
    flood: Callable[[Peer, int], bytes], most: int
) -> None:
    """TIME_SLICE_WORK: one header block of MAX_FIELDS, heads of 45 calls."""
    peer = Peer(clock=Clock().time, max_streams=200)
    peer.http2.reset(peer.request(1), CODE.CANCEL)
    for stream_id in range(3, 181, 2):
        peer.request(stream_id)
    frames = [flood(peer, 2 * number + 1001) for number in range(99)]
    assert most // 2 <= frames_in_a_time_slice(peer, frames) <= most


def test_tiny_data_beyond_the_rate_have_to_wait() -> None:
    """MAX_TINY_DATA, and MAX_TINY_DATA_PER_SECOND: the connection is not closed for them."""
    clock = Clock()
    peer = Peer(clock=clock.time)
    peer.request()
    http2 = peer.http2
    peer.send(data(1) * MAX_TINY_DATA)
    assert http2.excess() == 0.0
    peer.send(data(1) * 500)
    assert http2.excess() == pytest.approx(500 / MAX_TINY_DATA_PER_SECOND)
    clock.now += 400 / MAX_TINY_DATA_PER_SECOND
    assert http2.excess() == pytest.approx(100 / MAX_TINY_DATA_PER_SECOND)
    clock.now += 101 / MAX_TINY_DATA_PER_SECOND
    assert http2.excess() == 0.0


@pytest.mark.parametrize("end", [False, True])
def test_small_bodies_and_frames_of_some_bytes_do_not_wait(end: bool) -> None:
    peer = Peer(clock=Clock().time)
    body = b"x" if end else bytes(TINY_FRAME)
    for stream_id in range(1, 2 * (MAX_TINY_DATA + 500), 2):
        stream = peer.request(stream_id)
        peer.send(data(stream_id, body, end))
        peer.events.clear()
        peer.http2.send_headers(stream, OK, True)
        if not end:
            peer.http2.reset(stream, CODE.NO_ERROR)
        peer.http2.take_output()
    assert peer.http2.excess() == 0.0


def test_goaway_under_load() -> None:
    """A client that goes away and comes back with its last id again and again: no call is lost."""
    peer = Peer(is_client=True, clock=Clock().time)
    opened = [open_request(peer) for _ in range(1000)]
    for last in range(1999, 0, -20):
        peer.send(encode_goaway(last, 0))
    left = list(peer.http2.streams.values())
    assert left == opened[:10]
    resets = [event.stream for event in peer.events if isinstance(event, StreamReset)]
    assert sorted(each.id for each in resets) == [each.id for each in opened[10:]]
    for stream in left:
        peer.send(peer.headers(stream.id, OK, end=True))
    assert peer.http2.streams == {}


def test_memory_of_ids_of_reset_streams_is_bounded() -> None:
    clock = Clock()
    peer = Peer(clock=clock.time)
    for number in range(5 * MAX_RESETS):
        clock.now += 1
        peer.http2.reset(peer.request(2 * number + 1), CODE.CANCEL)
        peer.http2.take_output()
    assert len(peer.http2._reset_ids) <= 2 * MAX_RESETS
    peer.send(data(2 * number + 1))


def test_server_may_reset_any_number_of_requests() -> None:
    peer = Peer(is_client=True, clock=Clock().time)
    for _ in range(2 * MAX_RESETS):
        peer.send(encode_rst_stream(open_request(peer).id, CODE.REFUSED_STREAM))
    assert len(peer.events) == 2 * MAX_RESETS


# ------------------------------------------------------------------------------------ rates


def test_events_are_allowed_at_once_and_in_time_but_never_more_than_the_most() -> None:
    clock = Clock()
    limit = RateLimit(5, 2, clock.time)

    def allowed_now() -> int:
        """Spend all that is allowed, and three more."""
        found = 0
        while limit.spend():
            found += 1
        assert [limit.spend(), limit.spend()] == [False, False]
        return found

    assert allowed_now() == 5
    assert limit.excess() == 1.5
    clock.now += 1.0
    assert limit.excess() == 0.5
    clock.now += 1.5
    assert (limit.excess(), allowed_now()) == (0.0, 2)
    clock.now += 1000
    assert allowed_now() == 5
    limit.earn(100)  # not more than the most
    limit.earn(1.5)
    assert allowed_now() == 5
    for _ in range(2):
        limit.earn(2.5)
    assert allowed_now() == 2
