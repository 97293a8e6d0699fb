from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http1.body import (
    LAST_CHUNK,
    BodyDecoder,
    ChunkedDecoder,
    LengthDecoder,
    UntilCloseDecoder,
    frame_chunk,
)
from gateway.http1.head import MalformedError
from tests.http1.splits import LAW, PLACES, all_splits, bytewise, cut

MIN_OVERHEAD = 64 * 1024


def chunk(data: bytes) -> bytes:
    return b"".join(frame_chunk(data))


@dataclass
class Decoded:
    body: bytes
    ended: bool
    rest: bytes
    """The rest of the decoder, and the pieces that it was not fed."""


def _decode(decoder: BodyDecoder, pieces: list[bytes]) -> Decoded:
    body = b""
    unread = list(pieces)
    while unread and not decoder.ended:
        body += decoder.feed(unread.pop(0))
        if decoder.rest and not decoder.ended:
            unread.insert(0, bytes(decoder.rest))
    rest = bytes(decoder.rest) + b"".join(unread)
    return Decoded(body, decoder.ended, rest)


def _is_rejected(data: bytes) -> bool:
    """Whether a chunked body is rejected; the split must not matter."""
    rejected = []
    for pieces in all_splits(data):
        try:
            _decode(ChunkedDecoder(), pieces)
            rejected.append(False)
        except MalformedError:
            rejected.append(True)
    assert len(set(rejected)) == 1
    return rejected[0]


# ---------------------------------------------------------------------------------- LengthDecoder


@LAW
@given(body=st.binary(max_size=40), rest=st.binary(max_size=10), places=PLACES)
@example(body=b"", rest=b"", places=[])
@example(body=b"", rest=b"x", places=[0, 0])
def test_length_decoder_separates_body_and_rest(
    body: bytes, rest: bytes, places: list[int]
) -> None:
    for pieces in ([body + rest], bytewise(body + rest), cut(body + rest, places)):
        assert _decode(LengthDecoder(len(body)), pieces) == Decoded(body, True, rest)
        if not rest:
            assert _decode(LengthDecoder(len(body) + 1), pieces) == Decoded(body, False, b"")


def test_length_decoder_of_0_bytes_has_ended() -> None:
    decoder = LengthDecoder(0)
    assert decoder.ended
    assert (decoder.feed(b""), decoder.rest) == (b"", b"")
    assert (decoder.feed(b"x"), decoder.rest) == (b"", b"x")
    assert decoder.ended


# ------------------------------------------------------------------------------- UntilCloseDecoder


@LAW
@given(body=st.binary(max_size=40), places=PLACES)
def test_until_close_decoder_never_ends(body: bytes, places: list[int]) -> None:
    for pieces in ([body], bytewise(body), cut(body, places)):
        assert _decode(UntilCloseDecoder(), pieces) == Decoded(body, False, b"")


# ---------------------------------------------------------------------------------- ChunkedDecoder

_EXTENSIONS = st.sampled_from(
    [b"", b"", b";a", b";a=b", b";a;b=c", b';a="b; c"', b';a="\\""', b";a=1;a=1"]
)
_SIZES = st.sampled_from([b"%x", b"%X", b"00%x"])
_TRAILERS = st.sampled_from(
    [
        *(b"X: a\r\n", b"X:\r\n", b"X: \x80\xff\r\n", b"Content-MD5: a=\r\n", b"Trailer: X\r\n"),
        *(b"Connection: close\r\n", b"Connection: upgrade\r\n", b"Upgrade: h2c\r\n"),
    ]
)


@st.composite
def _chunked(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Draw a body and a chunked encoding of it."""
    pieces = draw(st.lists(st.binary(min_size=1, max_size=20), max_size=5))
    text = b""
    for piece in [*pieces, b""]:
        text += draw(_SIZES) % len(piece) + draw(_EXTENSIONS) + b"\r\n"
        text += piece + b"\r\n" if piece else b""
    trailers = draw(st.lists(_TRAILERS, max_size=3))
    return b"".join(pieces), text + b"".join(trailers) + b"\r\n"


@LAW
@given(written=_chunked(), places=PLACES)
@example(written=(b"", LAST_CHUNK), places=[0, 1, 2, 3, 4, 5])
@example(written=(b"\r\n0\r\n\r\n", chunk(b"\r\n0\r\n\r\n") + LAST_CHUNK), places=[])
def test_chunked_decoder_decodes_the_body(written: tuple[bytes, bytes], places: list[int]) -> None:
    body, text = written
    for pieces in ([text], bytewise(text), cut(text, places)):
        assert _decode(ChunkedDecoder(), pieces) == Decoded(body, True, b"")
    for pieces in ([text[:-1]], bytewise(text[:-1]), cut(text[:-1], places)):
        assert _decode(ChunkedDecoder(), pieces) == Decoded(body, False, b"")


@pytest.mark.parametrize(
    "text",
    [
        # sizes
        *(b"x\r\n", b"\r\n", b"\n", b";a\r\n", b"-1\r\n", b"+1\r\na\r\n", b"0x1\r\na\r\n"),
        *(b" 1\r\na\r\n", b"1 \r\na\r\n", b"1\t\r\na\r\n", b"1_\r\n", b"1,1\r\n", b"1\x00\r\n"),
        *(b"1\xff\r\n", b"1\x0b\r\n", b"1.0\r\na\r\n", b"g\r\n", b"1" + b"0" * 16 + b"\r\n"),
        b"f" * 17 + b"\r\n",
        # line ends
        *(b"1\na\r\n", b"1\r\r\na\r\n", b"1\rxa\r\n", b"0\n\n", b"0\r\n\n", b"0\r\n\rx"),
        # extensions
        *(b"1;\r\na\r\n", b"1; a\r\na\r\n", b"1;a\na\r\n", b"1;a\x00\r\na\r\n", b"1;\xff\r\n"),
        *(b"1;a=\x01\r\na\r\n", b"1;a=b\na\r\n", b'1;a="\r\na\r\n', b"1;a\rb\r\na\r\n"),
        b'1;a="\n"\r\na\r\n',
        # data
        *(b"1\r\nab\r\n", b"1\r\na\n0\r\n\r\n", b"1\r\nab\n", b"1\r\na\rx", b"2\r\na\r\n0\r\n\r\n"),
        b"1\r\na0\r\n\r\n",
        # trailers
        *(b"0\r\nX\r\n\r\n", b"0\r\nX : a\r\n\r\n", b"0\r\n X: a\r\n\r\n", b"0\r\nX: a\n\r\n"),
        *(b"0\r\nX: \x01\r\n\r\n", b"0\r\nX: a\r\n b\r\n\r\n", b"0\r\n: a\r\n\r\n"),
        # RFC 9110, section 6.5.1: no framing fields in trailers
        *(b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\nTransfer-Encoding: chunked\r\n\r\n"),
    ],
)
def test_invalid_chunks_are_rejected(text: bytes) -> None:
    assert _is_rejected(text)
    assert _is_rejected(chunk(b"abc") + text)


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"1;", b"a" * 1000),
        (b'1;a="', b"b" * 1000),
        (b"1", b";a=b" * 250),
        (b"", b"0" * 1000),
        (b"0\r\nX: ", b"a" * 1000),
        (b"0\r\n", b"X: a\r\n" * 170),
    ],
)
def test_endless_chunk_framing_is_rejected_and_not_buffered(start: bytes, more: bytes) -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(chunk(b"abc") + start) == b"abc"
    tracemalloc.start()
    try:
        for _ in range(MIN_OVERHEAD // len(more)):
            assert decoder.feed(more) == b""
        with pytest.raises(MalformedError, match="more bytes of chunk framing than of data"):
            decoder.feed(more)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Twice, because the parser copies when it appends.
    assert peak < 3 * MIN_OVERHEAD


def test_number_of_chunks_with_extensions_is_not_limited() -> None:
    decoder = ChunkedDecoder()
    text = b"1;" + b"a" * 10 + b"\r\nx\r\n"
    for _ in range(2 * MIN_OVERHEAD // len(text)):
        assert decoder.feed(text[:9]) == b""
        assert decoder.feed(text[9:]) == b"x"


@pytest.mark.parametrize("after", [b"\r\n", b"\n", b"\r", b"\r\n\r\n"])
def test_empty_lines_after_the_last_chunk_are_dropped(after: bytes) -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(chunk(b"abc") + LAST_CHUNK + after) == b"abc"
    assert decoder.ended
    assert not decoder.rest


@pytest.mark.parametrize("data", [b"x", b"\r\n", b"0123456789abcdef"])
def test_tiny_chunks_are_decoded_in_several_calls(data: bytes) -> None:
    count, most = 50_000, 5_000
    decoder = ChunkedDecoder()
    rest: bytes | memoryview = chunk(data) * count + LAST_CHUNK + b"GET"
    bodies = []
    while not decoder.ended:
        bodies.append(bytes(decoder.feed(rest)))
        rest = decoder.rest
    assert b"".join(bodies) == data * count
    assert max(map(len, bodies)) <= most * len(data)
    assert decoder.rest == b"GET"


@pytest.mark.parametrize("size", [1000, 64 * 1024, 1000 * 1024])
def test_larger_chunks_are_decoded_in_one_call(size: int) -> None:
    decoder = ChunkedDecoder()
    count = 1000 * 1024 // size
    assert len(decoder.feed(chunk(bytes(size)) * count)) == size * count
    assert not decoder.rest


def test_requests_after_the_last_chunk_are_not_copied() -> None:
    decoder = ChunkedDecoder()
    data = chunk(b"abc") + LAST_CHUNK + bytes(100_000)
    assert decoder.feed(data) == b"abc"
    assert isinstance(decoder.rest, memoryview)
    assert decoder.rest.obj is data


# ---------------------------------------------------------------------------------- the rest

TRAPS = st.lists(
    st.sampled_from(
        [
            *(b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"a", b"\r", b"\n", b"0", bytes(9)),
            b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        ]
    ),
    min_size=1,
).map(b"".join)


@LAW
@given(
    st.lists(TRAPS, max_size=4),
    st.sampled_from([b"0\r\n", b"000;x=y\r\n", b"0\r\nX: a\r\n", b"0\r\nX: 0\r\nY:\r\n"]),
    st.one_of(st.just(b""), TRAPS),
    PLACES,
)
@example([b"a"], b"0\r\n", b"GET / HTTP/1.1\r\n\r\n", [10])
def test_rest_does_not_depend_on_how_bytes_arrive(
    chunks: list[bytes], last: bytes, after: bytes, places: list[int]
) -> None:
    data = b"".join(map(chunk, chunks)) + last + b"\r\n" + after
    decoded = _decode(ChunkedDecoder(), cut(data, places))
    assert decoded.ended
    assert decoded.body == b"".join(chunks)
    assert decoded.rest.lstrip(b"\r\n") == after.lstrip(b"\r\n")
