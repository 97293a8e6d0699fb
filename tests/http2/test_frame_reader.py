from __future__ import annotations

import tracemalloc
from itertools import product

import hyperframe.frame as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.frame_reader import (
    MAX_CONTINUATIONS,
    MAX_CONTROL_PAYLOAD,
    MAX_HEADER_BLOCK,
    FrameReader,
)
from gateway.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PRIORITY_FLAG,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    DataFrame,
)
from tests.http1.splits import LAW, PLACES, all_splits, bytewise, cut
from tests.http2.frame_bytes import Told, frame, read

_STREAMS = st.one_of(st.sampled_from([1, 2, 3, 2**31 - 1]), st.integers(1, 2**31 - 1))
_WORDS = st.one_of(st.sampled_from([0, 1, 8, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1))
_PAYLOADS = st.binary(max_size=60)


def _flags(draw: st.DrawFn, names: list[str]) -> list[str]:
    return sorted(draw(st.sets(st.sampled_from(names))))


@st.composite
def _data(draw: st.DrawFn) -> tuple[list[oracle.Frame], Told]:
    stream, data = draw(_STREAMS), draw(_PAYLOADS)
    flags = _flags(draw, ["END_STREAM", "PADDED"])
    padding = draw(st.integers(0, 255)) if "PADDED" in flags else 0
    size = len(data) + (1 + padding if "PADDED" in flags else 0)
    made = oracle.DataFrame(stream, data, flags=flags, pad_length=padding)
    return [made], ("DATA", stream, data, size, "END_STREAM" in flags)


@st.composite
def _headers(draw: st.DrawFn) -> tuple[list[oracle.Frame], Told]:
    stream, fragments = draw(_STREAMS), draw(st.lists(_PAYLOADS, min_size=1, max_size=5))
    flags = _flags(draw, ["END_STREAM", "PADDED", "PRIORITY"])
    depends_on = draw(st.one_of(st.just(stream), _STREAMS))
    first = oracle.HeadersFrame(
        stream,
        fragments[0],
        flags=flags,
        pad_length=draw(st.integers(0, 255)) if "PADDED" in flags else 0,
        depends_on=depends_on,
        stream_weight=draw(st.integers(0, 255)),
        exclusive=draw(st.booleans()),
    )
    made: list[oracle.Frame] = [first]
    made += [oracle.ContinuationFrame(stream, fragment) for fragment in fragments[1:]]
    made[-1].flags.add("END_HEADERS")
    depends_on_itself = "PRIORITY" in flags and depends_on == stream
    block = b"".join(fragments)
    return made, ("HeadersFrame", stream, block, "END_STREAM" in flags, depends_on_itself)


@st.composite
def _push_promise(draw: st.DrawFn) -> tuple[list[oracle.Frame], Told]:
    stream, promised, block = draw(_STREAMS), draw(_STREAMS.map(lambda s: s & ~1 or 2)), b"block"
    flags = ["END_HEADERS", *_flags(draw, ["PADDED"])]
    padding = draw(st.integers(0, 255)) if "PADDED" in flags else 0
    made = oracle.PushPromiseFrame(stream, promised, block, flags=flags, pad_length=padding)
    return [made], ("PushPromiseFrame", stream, block, promised)


@st.composite
def _small(draw: st.DrawFn) -> tuple[list[oracle.Frame], Told]:
    """Draw one of the frames that have no flags but ACK."""
    stream, word, data = draw(_STREAMS), draw(_WORDS), draw(st.binary(min_size=8, max_size=8))
    ack = draw(st.booleans())
    flags = ["ACK"] if ack else []
    settings = {} if ack else draw(st.dictionaries(st.integers(7, 255), _WORDS, max_size=5))
    increment = word & 0x7FFFFFFF or 1
    either = draw(st.sampled_from([0, stream]))
    extension = oracle.ExtensionFrame(0xA + word % 240, either, word % 256, data)
    extension.body_len = len(data)  # which hyperframe sets in frames that it has read
    choices: list[tuple[oracle.Frame, Told]] = [
        (
            oracle.PriorityFrame(stream, depends_on=stream ^ 1, stream_weight=7),
            ("PriorityFrame", stream),
        ),
        (oracle.RstStreamFrame(stream, word), ("RstStreamFrame", stream, word)),
        (
            oracle.SettingsFrame(0, settings, flags=flags),
            ("SettingsFrame", 0, ack, list(settings.items())),
        ),
        (oracle.PingFrame(0, data, flags=flags), ("PingFrame", 0, ack, data)),
        (
            oracle.GoAwayFrame(0, stream, word, data),
            ("GoAwayFrame", 0, stream, word, data),
        ),
        (
            oracle.WindowUpdateFrame(either, increment),
            ("WindowUpdateFrame", either, increment),
        ),
        (
            extension,
            ("UnknownFrame", either, 0xA + word % 240, 8),
        ),
    ]
    made, told = draw(st.sampled_from(choices))
    return [made], told


_FRAMES = st.lists(st.one_of(_data(), _headers(), _push_promise(), _small()), max_size=5)


def _serialized(frames: list[tuple[list[oracle.Frame], Told]]) -> bytes:
    return b"".join(each.serialize() for made, _ in frames for each in made)


@LAW
@given(_FRAMES, PLACES)
def test_frames_of_hyperframe_are_read_however_they_arrive(
    frames: list[tuple[list[oracle.Frame], Told]], places: list[int]
) -> None:
    text = _serialized(frames)
    expected = [told for _, told in frames]
    assert read([text]) == expected
    assert read(cut(text, places)) == expected
    assert read([memoryview(piece) for piece in bytewise(text)]) == expected


@LAW
@given(_FRAMES, PLACES, st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=4))
def test_mutated_frames_give_the_same_frames_and_error_however_they_arrive(
    frames: list[tuple[list[oracle.Frame], Told]],
    places: list[int],
    mutations: list[tuple[int, int]],
) -> None:
    text = bytearray(_serialized(frames))
    for place, byte in mutations:
        if place < len(text):
            text[place] = byte
    whole = read([bytes(text)])
    assert read(cut(bytes(text), places)) == whole
    assert read(bytewise(bytes(text))) == whole


@LAW
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_any_bytes_raise_no_other_error(pieces: list[bytes]) -> None:
    assert read(pieces) == read([b"".join(pieces)])


_STREAM_0, _STREAM_1, _RESERVED = 0, 1, 2**31

_CONNECTION_ERRORS = {
    # Sections 6.1 to 6.10: stream ids.
    "DATA on stream 0": (frame(DATA, 0, 0, b"x"), "PROTOCOL_ERROR"),
    "HEADERS on stream 0": (frame(HEADERS, END_HEADERS, _RESERVED), "PROTOCOL_ERROR"),
    "PRIORITY on stream 0": (frame(PRIORITY, 0, 0, bytes(5)), "PROTOCOL_ERROR"),
    "RST_STREAM on stream 0": (frame(RST_STREAM, 0, 0, bytes(4)), "PROTOCOL_ERROR"),
    "PUSH_PROMISE on stream 0": (frame(PUSH_PROMISE, 0, 0, bytes(4)), "PROTOCOL_ERROR"),
    "SETTINGS on a stream": (frame(SETTINGS, 0, 1), "PROTOCOL_ERROR"),
    "PING on a stream": (frame(PING, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
    "GOAWAY on a stream": (frame(GOAWAY, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
    # Lengths.
    "RST_STREAM of 3 bytes": (frame(RST_STREAM, 0, 1, bytes(3)), "FRAME_SIZE_ERROR"),
    "PING of 7 bytes": (frame(PING, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
    "WINDOW_UPDATE of 5 bytes": (frame(WINDOW_UPDATE, 0, 1, bytes(5)), "FRAME_SIZE_ERROR"),
    "SETTINGS of 7 bytes": (frame(SETTINGS, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
    "an acknowledgement of SETTINGS of 6 bytes": (
        frame(SETTINGS, ACK, 0, bytes(6)),
        "FRAME_SIZE_ERROR",
    ),
    "GOAWAY that is too short": (frame(GOAWAY, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
    "HEADERS that is too short": (
        frame(HEADERS, END_HEADERS | PRIORITY_FLAG, 1, bytes(4)),
        "FRAME_SIZE_ERROR",
    ),
    "PUSH_PROMISE that is too short": (
        frame(PUSH_PROMISE, PADDED, 1, bytes(4)),
        "FRAME_SIZE_ERROR",
    ),
    "DATA that is too short": (frame(DATA, PADDED, 1), "FRAME_SIZE_ERROR"),
    # Padding.
    "padding of the length of its frame": (
        frame(DATA, PADDED, 1, b"\x04\0\0\0"),
        "PROTOCOL_ERROR",
    ),
    "padding longer than its frame": (
        frame(HEADERS, PADDED | PRIORITY_FLAG | END_HEADERS, 1, b"\x04" + bytes(8)),
        "PROTOCOL_ERROR",
    ),
    # Values.
    "WINDOW_UPDATE by zero bytes": (frame(WINDOW_UPDATE, 0, 0, b"\x80\0\0\0"), "PROTOCOL_ERROR"),
    "ENABLE_PUSH of 2": (frame(SETTINGS, 0, 0, b"\0\2\0\0\0\2"), "PROTOCOL_ERROR"),
    "an INITIAL_WINDOW_SIZE of 2147483648 bytes": (
        frame(SETTINGS, 0, 0, b"\0\4\x80\0\0\0"),
        "FLOW_CONTROL_ERROR",
    ),
    "a MAX_FRAME_SIZE of 16383 bytes": (
        frame(SETTINGS, 0, 0, b"\0\5\0\0\x3f\xff"),
        "PROTOCOL_ERROR",
    ),
    "a MAX_FRAME_SIZE of 16777216 bytes": (
        frame(SETTINGS, 0, 0, b"\0\5\x01\0\0\0"),
        "PROTOCOL_ERROR",
    ),
    "PUSH_PROMISE of stream 0": (
        frame(PUSH_PROMISE, END_HEADERS, 1, b"\x80\0\0\0"),
        "PROTOCOL_ERROR",
    ),
    # Header blocks.
    "CONTINUATION without a header block": (frame(CONTINUATION, 4, 1), "PROTOCOL_ERROR"),
}


@pytest.mark.parametrize("reason", _CONNECTION_ERRORS)
def test_invalid_frame_ends_the_connection(reason: str) -> None:
    text, code = _CONNECTION_ERRORS[reason]
    ping = frame(PING, 0, 0, bytes(8))
    for pieces in all_splits(ping + text + ping):
        found = read(pieces)
        assert found == [("PingFrame", 0, False, bytes(8)), ("error", code, reason, 0)]


@pytest.mark.parametrize(
    "other",
    [
        frame(DATA, 0, 1, b"x"),
        frame(HEADERS, END_HEADERS, 1),
        frame(PING, 0, 0, bytes(8)),
        frame(SETTINGS, 0, 0),
        frame(0xFA, 0, 1),
        frame(CONTINUATION, END_HEADERS, 3),
        frame(PRIORITY, 0, 1, bytes(4)),
        frame(WINDOW_UPDATE, 0, 1, bytes(4)),
    ],
)
def test_other_frame_within_a_header_block_ends_the_connection(other: bytes) -> None:
    error = ("error", "PROTOCOL_ERROR", "another frame within a header block", 0)
    for start in (frame(HEADERS, 0, 1), frame(PUSH_PROMISE, 0, 1, b"\0\0\0\2")):
        for before in (b"", frame(CONTINUATION, 0, 1)):
            assert read([start + before + other]) == [error]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (frame(WINDOW_UPDATE, 0, 5, bytes(4)), "PROTOCOL_ERROR"),
        (frame(PRIORITY, 0, 5, bytes(4)), "FRAME_SIZE_ERROR"),
        (frame(PRIORITY, 0, 5, bytes(100)), "FRAME_SIZE_ERROR"),
        (frame(PRIORITY, 0, 5), "FRAME_SIZE_ERROR"),
        (frame(PRIORITY, 0, 5, b"\x80\0\0\5\0"), "PROTOCOL_ERROR"),
    ],
)
def test_frames_after_a_stream_error_are_read(text: bytes, code: str) -> None:
    ping = frame(PING, ACK, 0, b"12345678")
    for pieces in all_splits(text + ping):
        error, after = read(pieces)
        assert error[:2] == ("error", code)
        assert error[3] == 5
        assert after == ("PingFrame", 0, True, b"12345678")


def test_frame_larger_than_announced_is_rejected_by_its_header() -> None:
    for kind, limit in product(range(11), (2**14, 2**20)):
        stream = 0 if kind in (SETTINGS, PING, GOAWAY) else 1
        reader = FrameReader(limit)
        reader.feed(frame(kind, 0, stream, bytes(limit + 1))[:9])
        with pytest.raises(Http2Error, match=f"{limit + 1} bytes, where {limit} are") as caught:
            reader.next_frame()
        assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR
        assert caught.value.ends_connection


@pytest.mark.parametrize("kind", [SETTINGS, GOAWAY])
def test_large_control_frame_is_rejected_by_its_header(kind: int) -> None:
    size = MAX_CONTROL_PAYLOAD // 6 * 6
    assert len(read([frame(kind, 0, 0, b"\xff" * size)], 2**22)) == 1
    text = frame(kind, 0, 0, b"\xff" * (size + 6))[:9]
    assert read([text], 2**22)[0][:2] == ("error", "ENHANCE_YOUR_CALM")


def test_header_block_of_the_maximum_size_is_read() -> None:
    first = frame(HEADERS, 0, 1, b"x" * (MAX_HEADER_BLOCK - 5))
    last = frame(CONTINUATION, END_HEADERS, 1, b"x" * 5)
    assert read([first + last], 2**22) == [
        ("HeadersFrame", 1, b"x" * MAX_HEADER_BLOCK, False, False)
    ]
    # It is rejected before it is buffered.
    error = ("error", "ENHANCE_YOUR_CALM", "a header block of more than 131072 bytes", 0)
    for text in (
        frame(HEADERS, END_HEADERS, 1, bytes(MAX_HEADER_BLOCK + 1))[:9],
        frame(PUSH_PROMISE, END_HEADERS, 1, bytes(MAX_HEADER_BLOCK + 1))[:9],
        first + frame(CONTINUATION, END_HEADERS, 1, bytes(6))[:9],
    ):
        assert read([text], 2**22) == [error]


def test_continuation_flood_ends_the_connection() -> None:
    """CVE-2024-27316 and others."""
    more = frame(CONTINUATION, 0, 1)
    last = frame(CONTINUATION, END_HEADERS, 1)
    start = frame(HEADERS, END_STREAM, 1, b"x")
    assert read([start + more * (MAX_CONTINUATIONS - 1) + last]) == [
        ("HeadersFrame", 1, b"x", True, False)
    ]
    error = ("error", "ENHANCE_YOUR_CALM", "more than 8 CONTINUATION frames", 0)
    assert read([start + more * MAX_CONTINUATIONS + last]) == [error]
    assert read([start, *[more] * 1000]) == [error]


def test_reserved_bits_and_unknown_flags_are_ignored() -> None:
    assert read(
        [
            frame(DATA, 0xF7, _RESERVED | 1, b"x")
            + frame(WINDOW_UPDATE, 0xFF, _RESERVED, b"\xff\xff\xff\xff")
            + frame(GOAWAY, 0xFF, 0, b"\xff" * 8)
        ]
    ) == [
        ("DATA", 1, b"x", 1, True),
        ("WindowUpdateFrame", 0, 2**31 - 1),
        ("GoAwayFrame", 0, 2**31 - 1, 2**32 - 1, b""),
    ]


def test_data_of_a_large_read_are_views_of_it() -> None:
    text = frame(DATA, END_STREAM, 1, bytes(2**20)) + frame(DATA, 0, 3, b"small")
    received = memoryview(text)
    reader = FrameReader(2**20)
    reader.feed(received[:200_000])
    first = reader.next_frame()
    assert isinstance(first, DataFrame)
    assert isinstance(first.data, memoryview)
    assert first.data.obj is text
    assert (len(first.data), first.size, first.ends_frame) == (199_991, 199_991, False)
    assert reader.next_frame() is None
    assert reader.size == 0
    reader.feed(received[200_000:])
    second, third = reader.next_frame(), reader.next_frame()
    assert isinstance(second, DataFrame)
    assert isinstance(second.data, memoryview)
    assert second.end_stream
    assert isinstance(third, DataFrame)
    # A small piece is a copy, and pins no buffer.
    assert third.data == b"small"
    assert isinstance(third.data, bytes)


def test_padding_counts_in_flow_control() -> None:
    text = frame(DATA, PADDED | END_STREAM, 1, b"\x05data" + bytes(5))
    for pieces in all_splits(text):
        assert read(pieces) == [("DATA", 1, b"data", 10, True)]
    reader = FrameReader()
    reader.feed(text[:-2])
    piece = reader.next_frame()
    assert isinstance(piece, DataFrame)
    assert (piece.data, piece.size, piece.ends_frame, piece.end_stream) == (
        b"data",
        8,
        False,
        False,
    )
    reader.feed(text[-2:])
    piece = reader.next_frame()
    assert isinstance(piece, DataFrame)
    assert (piece.data, piece.size, piece.ends_frame, piece.end_stream) == (b"", 2, True, True)


def test_limit_can_change_between_frames() -> None:
    reader = FrameReader()
    large = frame(DATA, 0, 1, bytes(2**14 + 1))
    reader.feed(frame(SETTINGS, ACK, 0) + large)
    assert reader.next_frame() is not None
    reader.max_frame_size = 2**15
    assert isinstance(reader.next_frame(), DataFrame)


def test_data_that_were_not_read_come_before_those_after() -> None:
    reader = FrameReader()
    reader.feed(frame(PING, 0, 0, b"first...") + frame(PING, 0, 0, b"second..")[:12])
    reader.feed(memoryview(frame(PING, 0, 0, b"second..")[12:]))
    assert [getattr(reader.next_frame(), "data", None) for _ in range(3)] == [
        b"first...",
        b"second..",
        None,
    ]


@pytest.mark.parametrize(
    ("text", "most"),
    [
        (frame(HEADERS, END_HEADERS, 1, bytes(MAX_HEADER_BLOCK)), 3 * MAX_HEADER_BLOCK),
        (frame(SETTINGS, 0, 0, bytes(6) * 2000), 500_000),
        (frame(0xEE, 0, 1, bytes(2**22)), 50_000),
        (frame(DATA, 0, 1, bytes(2**22)), 50_000),
    ],
    ids=["HEADERS", "SETTINGS", "unknown", "DATA"],
)
def test_slow_large_frames_take_no_more_memory_than_the_limits(text: bytes, most: int) -> None:
    reader = FrameReader(2**22)
    tracemalloc.start()
    try:
        for start in range(0, len(text) - 1, 100):
            reader.feed(text[start : min(start + 100, len(text) - 1)])
            while reader.next_frame() is not None:
                pass
            assert reader.size <= MAX_HEADER_BLOCK
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
