from __future__ import annotations

import tracemalloc
from typing import Any

import hyperframe.frame as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http2 import frames
from gateway.http2.frame_reader import (
    MAX_CONTINUATIONS,
    MAX_CONTROL_PAYLOAD,
    MAX_HEADER_BLOCK,
    FrameReader,
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
        (oracle.PriorityFrame(stream, depends_on=stream ^ 1, stream_weight=7), ("Frame", stream)),
        (oracle.RstStreamFrame(stream, word), ("RstStreamFrame", stream, word)),
        (
            oracle.SettingsFrame(0, settings, flags=flags),
            ("SettingsFrame", 0, ack, list(settings.items())),
        ),
        (oracle.PingFrame(0, data, flags=flags), ("PingFrame", 0, ack, data)),
        (oracle.GoAwayFrame(0, stream, word, data), ("GoAwayFrame", 0, stream, word, data)),
        (oracle.WindowUpdateFrame(either, increment), ("WindowUpdateFrame", either, increment)),
        (extension, ("Frame", either)),
    ]
    made, told = draw(st.sampled_from(choices))
    return [made], told


_FRAMES = st.lists(st.one_of(_data(), _headers(), _small()), max_size=5)


def _serialized(frames: list[tuple[list[oracle.Frame], Told]]) -> bytes:
    return b"".join(each.serialize() for made, _ in frames for each in made)


@LAW
@given(_FRAMES, PLACES)
def test_frames_of_hyperframe_are_read_however_they_arrive(
    made: list[tuple[list[oracle.Frame], Told]], places: list[int]
) -> None:
    text = _serialized(made)
    expected = [told for _, told in made]
    assert read([text]) == expected
    assert read(cut(text, places)) == expected
    assert read([memoryview(piece) for piece in bytewise(text)]) == expected


@LAW
@given(
    st.one_of(_FRAMES.map(_serialized), st.binary(max_size=120)),
    PLACES,
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=4),
)
def test_any_bytes_give_the_same_frames_and_error_however_they_arrive(
    start: bytes, places: list[int], mutations: list[tuple[int, int]]
) -> None:
    text = bytearray(start)
    for place, byte in mutations:
        if place < len(text):
            text[place] = byte
    whole = read([bytes(text)])
    assert read(cut(bytes(text), places)) == whole
    assert read(bytewise(bytes(text))) == whole


_RESERVED = 2**31
_PROTOCOL, _SIZE, _FLOW = "PROTOCOL_ERROR", "FRAME_SIZE_ERROR", "FLOW_CONTROL_ERROR"

_PUSHED = "PUSH_PROMISE, which was not allowed"
_MAX = "a MAX_FRAME_SIZE of"

_CONNECTION_ERRORS: list[tuple[tuple[int, int, int, bytes], str, str]] = [
    # Sections 6.1 to 6.10: stream ids.
    ((frames.DATA, 0, 0, b"x"), "DATA on stream 0", _PROTOCOL),
    ((frames.HEADERS, frames.END_HEADERS, _RESERVED, b""), "HEADERS on stream 0", _PROTOCOL),
    ((frames.PRIORITY, 0, 0, bytes(5)), "PRIORITY on stream 0", _PROTOCOL),
    ((frames.RST_STREAM, 0, 0, bytes(4)), "RST_STREAM on stream 0", _PROTOCOL),
    ((frames.PUSH_PROMISE, frames.END_HEADERS, 1, b"\0\0\0\2"), _PUSHED, _PROTOCOL),
    ((frames.SETTINGS, 0, 1, b""), "SETTINGS on a stream", _PROTOCOL),
    ((frames.PING, 0, 1, bytes(8)), "PING on a stream", _PROTOCOL),
    ((frames.GOAWAY, 0, 1, bytes(8)), "GOAWAY on a stream", _PROTOCOL),
    # Lengths.
    ((frames.RST_STREAM, 0, 1, bytes(3)), "RST_STREAM of 3 bytes", _SIZE),
    ((frames.PING, 0, 0, bytes(7)), "PING of 7 bytes", _SIZE),
    ((frames.WINDOW_UPDATE, 0, 1, bytes(5)), "WINDOW_UPDATE of 5 bytes", _SIZE),
    ((frames.SETTINGS, 0, 0, bytes(7)), "SETTINGS of 7 bytes", _SIZE),
    ((frames.SETTINGS, 1, 0, bytes(6)), "an acknowledgement of SETTINGS of 6 bytes", _SIZE),
    ((frames.GOAWAY, 0, 0, bytes(7)), "GOAWAY that is too short", _SIZE),
    ((frames.HEADERS, 0x24, 1, bytes(4)), "HEADERS that is too short", _SIZE),
    ((frames.DATA, frames.PADDED, 1, b""), "DATA that is too short", _SIZE),
    # Padding.
    (
        (frames.DATA, frames.PADDED, 1, b"\x04\0\0\0"),
        "padding of the length of its frame",
        _PROTOCOL,
    ),
    ((frames.HEADERS, 0x2C, 1, b"\x04" + bytes(8)), "padding longer than its frame", _PROTOCOL),
    # Values.
    ((frames.WINDOW_UPDATE, 0, 0, b"\x80\0\0\0"), "WINDOW_UPDATE by zero bytes", _PROTOCOL),
    ((frames.SETTINGS, 0, 0, b"\0\2\0\0\0\2"), "ENABLE_PUSH of 2", _PROTOCOL),
    (
        (frames.SETTINGS, 0, 0, b"\0\4\x80\0\0\0"),
        "an INITIAL_WINDOW_SIZE of 2147483648 bytes",
        _FLOW,
    ),
    ((frames.SETTINGS, 0, 0, b"\0\5\0\0\x3f\xff"), f"{_MAX} 16383 bytes", _PROTOCOL),
    ((frames.SETTINGS, 0, 0, b"\0\5\x01\0\0\0"), f"{_MAX} 16777216 bytes", _PROTOCOL),
    # Header blocks.
    ((frames.CONTINUATION, 4, 1, b""), "CONTINUATION without a header block", _PROTOCOL),
]


@pytest.mark.parametrize(("parts", "reason", "code"), _CONNECTION_ERRORS)
def test_invalid_frame_ends_the_connection(
    parts: tuple[int, int, int, bytes], reason: str, code: str
) -> None:
    ping = frame(frames.PING, 0, 0, bytes(8))
    for pieces in all_splits(ping + frame(*parts) + ping):
        found = read(pieces)
        assert found == [("PingFrame", 0, False, bytes(8)), ("error", code, reason, 0)]


@pytest.mark.parametrize(
    "other",
    [
        frame(frames.DATA, 0, 1, b"x"),
        frame(frames.HEADERS, frames.END_HEADERS, 1),
        frame(frames.PING, 0, 0, bytes(8)),
        frame(frames.SETTINGS, 0, 0),
        frame(0xFA, 0, 1),
        frame(frames.CONTINUATION, frames.END_HEADERS, 3),
        frame(frames.PRIORITY, 0, 1, bytes(4)),
        frame(frames.WINDOW_UPDATE, 0, 1, bytes(4)),
    ],
)
def test_other_frame_within_a_header_block_ends_the_connection(other: bytes) -> None:
    error = ("error", "PROTOCOL_ERROR", "another frame within a header block", 0)
    for before in (b"", frame(frames.CONTINUATION, 0, 1)):
        assert read([frame(frames.HEADERS, 0, 1) + before + other]) == [error]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (frame(frames.WINDOW_UPDATE, 0, 5, bytes(4)), "PROTOCOL_ERROR"),
        (frame(frames.PRIORITY, 0, 5, bytes(4)), "FRAME_SIZE_ERROR"),
        (frame(frames.PRIORITY, 0, 5, bytes(100)), "FRAME_SIZE_ERROR"),
        (frame(frames.PRIORITY, 0, 5), "FRAME_SIZE_ERROR"),
        (frame(frames.PRIORITY, 0, 5, b"\x80\0\0\5\0"), "PROTOCOL_ERROR"),
    ],
)
def test_frames_after_a_stream_error_are_read(text: bytes, code: str) -> None:
    ping = frame(frames.PING, frames.ACK, 0, b"12345678")
    for pieces in all_splits(text + ping):
        error, after = read(pieces)
        assert error[:2] == ("error", code)
        assert error[3] == 5
        assert after == ("PingFrame", 0, True, b"12345678")


def test_frame_that_is_too_large_is_rejected_by_its_header() -> None:
    for kind in range(11):
        stream = 0 if kind in (frames.SETTINGS, frames.PING, frames.GOAWAY) else 1
        reason = f"a frame of {2**14 + 1} bytes, where {2**14} are allowed"
        error = ("error", "FRAME_SIZE_ERROR", reason, 0)
        assert read([frame(kind, 0, stream, bytes(2**14 + 1))[:9]])[0] == error
    size = MAX_CONTROL_PAYLOAD // 6 * 6
    for kind in (frames.SETTINGS, frames.GOAWAY):
        assert len(read([frame(kind, 0, 0, b"\xff" * size)], 2**22)) == 1
        text = frame(kind, 0, 0, b"\xff" * (size + 6))[:9]
        assert read([text], 2**22)[0][:2] == ("error", "ENHANCE_YOUR_CALM")


def test_header_block_of_the_maximum_size_is_read() -> None:
    first = frame(frames.HEADERS, 0, 1, b"x" * (MAX_HEADER_BLOCK - 5))
    last = frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"x" * 5)
    assert read([first + last], 2**22) == [
        ("HeadersFrame", 1, b"x" * MAX_HEADER_BLOCK, False, False)
    ]
    # It is rejected before it is buffered.
    error = ("error", "ENHANCE_YOUR_CALM", "a header block of more than 131072 bytes", 0)
    for text in (
        frame(frames.HEADERS, frames.END_HEADERS, 1, bytes(MAX_HEADER_BLOCK + 1))[:9],
        first + frame(frames.CONTINUATION, frames.END_HEADERS, 1, bytes(6))[:9],
    ):
        assert read([text], 2**22) == [error]


def test_continuation_flood_ends_the_connection() -> None:
    """CVE-2024-27316 and others."""
    more = frame(frames.CONTINUATION, 0, 1)
    last = frame(frames.CONTINUATION, frames.END_HEADERS, 1)
    start = frame(frames.HEADERS, frames.END_STREAM, 1, b"x")
    assert read([start + more * (MAX_CONTINUATIONS - 1) + last]) == [
        ("HeadersFrame", 1, b"x", True, False)
    ]
    error = ("error", "ENHANCE_YOUR_CALM", "more than 8 CONTINUATION frames", 0)
    assert read([start + more * MAX_CONTINUATIONS + last]) == [error]
    assert read([start, *[more] * 1000]) == [error]


def test_reserved_bits_and_unknown_flags_are_ignored() -> None:
    assert read(
        [
            frame(frames.DATA, 0xF7, _RESERVED | 1, b"x")
            + frame(frames.WINDOW_UPDATE, 0xFF, _RESERVED, b"\xff\xff\xff\xff")
            + frame(frames.GOAWAY, 0xFF, 0, b"\xff" * 8)
        ]
    ) == [
        ("DATA", 1, b"x", 1, True),
        ("WindowUpdateFrame", 0, 2**31 - 1),
        ("GoAwayFrame", 0, 2**31 - 1, 2**32 - 1, b""),
    ]


def test_data_of_a_large_read_are_views_of_it() -> None:
    text = frame(frames.DATA, frames.END_STREAM, 1, bytes(2**20)) + frame(
        frames.DATA, 0, 3, b"small"
    )
    received = memoryview(text)
    reader = FrameReader(2**20)
    reader.feed(received[:200_000])
    first = reader.next_frame()
    assert isinstance(first, frames.DataFrame)
    assert isinstance(first.data, memoryview)
    assert first.data.obj is text
    assert (len(first.data), first.size, first.ends_frame) == (199_991, 199_991, False)
    assert reader.next_frame() is None
    assert reader.size == 0
    reader.feed(received[200_000:])
    second, third = reader.next_frame(), reader.next_frame()
    assert isinstance(second, frames.DataFrame)
    assert isinstance(second.data, memoryview)
    assert second.end_stream
    assert isinstance(third, frames.DataFrame)
    # A small piece is a copy, and pins no buffer.
    assert third.data == b"small"
    assert isinstance(third.data, bytes)


def test_padding_counts_in_flow_control() -> None:
    text = frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\x05data" + bytes(5))
    for pieces in all_splits(text):
        assert read(pieces) == [("DATA", 1, b"data", 10, True)]
    reader = FrameReader()
    reader.feed(text[:-2])
    piece = reader.next_frame()
    assert isinstance(piece, frames.DataFrame)
    assert (piece.data, piece.size, piece.ends_frame, piece.end_stream) == (
        b"data",
        8,
        False,
        False,
    )
    reader.feed(text[-2:])
    piece = reader.next_frame()
    assert isinstance(piece, frames.DataFrame)
    assert (piece.data, piece.size, piece.ends_frame, piece.end_stream) == (b"", 2, True, True)


def test_data_that_were_not_read_come_before_those_after() -> None:
    reader = FrameReader()
    reader.feed(frame(frames.PING, 0, 0, b"first...") + frame(frames.PING, 0, 0, b"second..")[:12])
    reader.feed(memoryview(frame(frames.PING, 0, 0, b"second..")[12:]))
    assert [getattr(reader.next_frame(), "data", None) for _ in range(3)] == [
        b"first...",
        b"second..",
        None,
    ]


@pytest.mark.parametrize(
    ("text", "most"),
    [
        (
            frame(frames.HEADERS, frames.END_HEADERS, 1, bytes(MAX_HEADER_BLOCK)),
            3 * MAX_HEADER_BLOCK,
        ),
        (frame(frames.SETTINGS, 0, 0, bytes(6) * 2000), 500_000),
        (frame(0xEE, 0, 1, bytes(2**22)), 50_000),
        (frame(frames.DATA, 0, 1, bytes(2**22)), 50_000),
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


# ------------------------------------------------------------------------------- frames to send


def _parse(text: bytes) -> list[Any]:
    """Parse frames with hyperframe, and see that it would write the same bytes."""
    frames: list[Any] = []
    while text:
        each, length = oracle.Frame.parse_frame_header(memoryview(text[:9]), strict=True)
        each.parse_body(memoryview(text[9 : 9 + length]))
        assert each.serialize() == text[: 9 + length]
        frames.append(each)
        text = text[9 + length :]
    return frames


@LAW
@given(_STREAMS, st.binary(max_size=200), st.booleans(), st.integers(1, 100))
def test_header_blocks_are_split_where_frames_are_too_small(
    stream: int, block: bytes, end_stream: bool, size: int
) -> None:
    first, *more = made = _parse(frames.encode_headers(stream, block, end_stream, size))
    assert isinstance(first, oracle.HeadersFrame)
    assert all(isinstance(each, oracle.ContinuationFrame) for each in more)
    assert all(each.stream_id == stream and len(each.data) <= size for each in made)
    assert b"".join(each.data for each in made) == block
    assert ["END_HEADERS" in each.flags for each in made] == [False] * len(more) + [True]
    assert ["END_STREAM" in each.flags for each in made] == [end_stream] + [False] * len(more)


def test_header_block_of_exactly_one_frame_has_no_continuation() -> None:
    for size, sizes in ((0, [0]), (2**14, [2**14]), (2**14 + 1, [2**14, 1])):
        made = _parse(frames.encode_headers(1, bytes(size), False))
        assert [len(each.data) for each in made] == sizes


@LAW
@given(_STREAMS, _WORDS, st.booleans(), st.binary(min_size=8, max_size=8))
def test_hyperframe_reads_each_frame(stream: int, word: int, flag: bool, data: bytes) -> None:
    (settings,) = _parse(frames.encode_settings([(7, word), (8, stream)]))
    assert (settings.settings, settings.flags) == ({7: word, 8: stream}, set())
    assert read([frames.SETTINGS_ACK]) == [("SettingsFrame", 0, True, [])]

    text = frames.encode_data_header(stream, len(data), flag) + data
    assert _parse(text)[0].data == data
    assert read([text]) == [("DATA", stream, data, 8, flag)]

    (reset,) = _parse(frames.encode_rst_stream(stream, word))
    assert (reset.stream_id, reset.error_code) == (stream, word)

    (ping,) = _parse(frames.encode_ping(data, flag))
    assert (ping.opaque_data, "ACK" in ping.flags) == (data, flag)

    (goaway,) = _parse(frames.encode_goaway(stream, word, data))
    assert (goaway.last_stream_id, goaway.error_code) == (stream, word)
    assert goaway.additional_data == data

    (update,) = _parse(frames.encode_window_update(stream if flag else 0, word >> 1 or 1))
    assert (update.stream_id, update.window_increment) == (stream if flag else 0, word >> 1 or 1)
