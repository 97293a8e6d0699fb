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

FREE_OVERHEAD = 64 * 1024


def chunk(data: bytes) -> bytes:
    return b"".join(frame_chunk(data))


@dataclass
class Decoded:
    body: bytes
    ended: bool
    rest: bytes
    """What the decoder calls the rest, and what it was not given any more."""

    @property
    def more(self) -> bool:
        return bool(self.rest)


def _decode(decoder: BodyDecoder, pieces: list[bytes]) -> Decoded:
    body = b""
    unread = list(pieces)
    while unread and not decoder.ended:
        body += decoder.feed(unread.pop(0))
        if decoder.rest and not decoder.ended:
            unread.insert(0, bytes(decoder.rest))
    rest = bytes(decoder.rest) + b"".join(unread)
    return Decoded(body, decoder.ended, rest)


def _is_refused(data: bytes) -> bool:
    """Tell whether a chunked body is, and that it is so however it comes."""
    refused = []
    for pieces in all_splits(data):
        try:
            _decode(ChunkedDecoder(), pieces)
            refused.append(False)
        except MalformedError:
            refused.append(True)
    assert len(set(refused)) == 1
    return refused[0]


# ---------------------------------------------------------------------------------- a length


@LAW
@given(body=st.binary(max_size=40), rest=st.binary(max_size=10), places=PLACES)
@example(body=b"", rest=b"", places=[])
@example(body=b"", rest=b"x", places=[0, 0])
def test_a_body_of_a_length(body: bytes, rest: bytes, places: list[int]) -> None:
    for pieces in ([body + rest], bytewise(body + rest), cut(body + rest, places)):
        assert _decode(LengthDecoder(len(body)), pieces) == Decoded(body, True, rest)


@LAW
@given(body=st.binary(min_size=1, max_size=40), places=PLACES)
def test_a_body_shorter_than_its_length(body: bytes, places: list[int]) -> None:
    for pieces in ([body[:-1]], bytewise(body[:-1]), cut(body[:-1], places)):
        assert _decode(LengthDecoder(len(body)), pieces) == Decoded(body[:-1], False, b"")


def test_a_body_of_no_bytes_has_ended() -> None:
    decoder = LengthDecoder(0)
    assert decoder.ended
    assert (decoder.feed(b""), decoder.rest) == (b"", b"")
    assert (decoder.feed(b"x"), decoder.rest) == (b"", b"x")
    assert decoder.ended


def test_a_length_may_be_huge() -> None:
    decoder = LengthDecoder(2**64 - 1)
    assert decoder.feed(b"abc") == b"abc"
    assert not decoder.ended


# ---------------------------------------------------------------------------------- until it closes


@LAW
@given(body=st.binary(max_size=40), places=PLACES)
def test_a_body_until_close(body: bytes, places: list[int]) -> None:
    for pieces in ([body], bytewise(body), cut(body, places)):
        assert _decode(UntilCloseDecoder(), pieces) == Decoded(body, False, b"")


# ---------------------------------------------------------------------------------- chunks

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
    """Give a body and a way to write it in chunks."""
    pieces = draw(st.lists(st.binary(min_size=1, max_size=20), max_size=5))
    text = b""
    for piece in [*pieces, b""]:
        text += draw(_SIZES) % len(piece) + draw(_EXTENSIONS) + b"\r\n"
        text += piece + b"\r\n" if piece else b""
    trailers = draw(st.lists(_TRAILERS, max_size=3))
    return b"".join(pieces), text + b"".join(trailers) + b"\r\n"


_BEHIND = st.one_of(
    st.sampled_from(
        [
            *(b"x", b"\x00", b"G", b"GET", b" ", b"\r\nx", b"\r\n\x00", LAST_CHUNK, chunk(b"abc")),
            *(b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"),
            b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"abc") + LAST_CHUNK,
        ]
    ),
    st.binary(min_size=1, max_size=5).filter(lambda data: data.strip(b"\r\n")),
)
"""What may follow; what nobody can see, and what makes the parser rise, have their own tests."""


@LAW
@given(written=_chunked(), places=PLACES)
@example(written=(b"", LAST_CHUNK), places=[0, 1, 2, 3, 4, 5])
@example(written=(b"\r\n0\r\n\r\n", chunk(b"\r\n0\r\n\r\n") + LAST_CHUNK), places=[])
def test_a_chunked_body(written: tuple[bytes, bytes], places: list[int]) -> None:
    body, text = written
    for pieces in ([text], bytewise(text), cut(text, places)):
        assert _decode(ChunkedDecoder(), pieces) == Decoded(body, True, b"")


@LAW
@given(written=_chunked(), behind=_BEHIND, places=PLACES)
def test_what_is_behind_the_last_chunk_is_not_of_the_body(
    written: tuple[bytes, bytes], behind: bytes, places: list[int]
) -> None:
    body, text = written
    for pieces in ([text + behind], bytewise(text + behind), cut(text + behind, places)):
        decoded = _decode(ChunkedDecoder(), pieces)
        assert decoded.body == body
        assert decoded.ended
        assert decoded.more


@LAW
@given(written=_chunked(), places=PLACES)
def test_a_chunked_body_that_breaks_off(written: tuple[bytes, bytes], places: list[int]) -> None:
    body, text = written
    for pieces in ([text[:-1]], bytewise(text[:-1]), cut(text[:-1], places)):
        assert _decode(ChunkedDecoder(), pieces) == Decoded(body, False, b"")


@LAW
@given(st.binary(max_size=20), PLACES)
def test_whatever_comes_is_chunks_or_malformed(text: bytes, places: list[int]) -> None:
    decoder = ChunkedDecoder()
    try:
        for piece in cut(chunk(b"abc") + text, places):
            decoder.feed(piece)
    except MalformedError as error:
        assert str(error)  # noqa: PT017


def test_a_chunked_body_is_given_as_it_comes() -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(b"5\r\nab") == b"ab"
    assert decoder.feed(b"c") == b"c"
    assert decoder.feed(b"") == b""
    assert decoder.feed(b"de\r\n1;x\r\nf\r\n1\r\n") == b"def"
    assert decoder.feed(b"g\r\n0\r\nX: a\r\n\r") == b"g"
    assert not decoder.ended
    assert decoder.feed(b"\n") == b""
    assert decoder.ended
    assert not decoder.rest


@pytest.mark.parametrize("behind", [b"x", b"\r\nx", b"GET / HTTP/1.1\r\n\r\n", LAST_CHUNK])
def test_nothing_is_taken_behind_the_end(behind: bytes) -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(chunk(b"abc") + LAST_CHUNK) == b"abc"
    assert decoder.feed(behind) == b""
    assert decoder.rest
    assert decoder.ended


@pytest.mark.parametrize(
    "text",
    [
        # sizes
        *(b"x\r\n", b"\r\n", b"\n", b";a\r\n", b"-1\r\n", b"+1\r\na\r\n", b"0x1\r\na\r\n"),
        *(b" 1\r\na\r\n", b"1 \r\na\r\n", b"1\t\r\na\r\n", b"1_\r\n", b"1,1\r\n", b"1\x00\r\n"),
        *(b"1\xff\r\n", b"1\x0b\r\n", b"1.0\r\na\r\n", b"g\r\n", b"1" + b"0" * 16 + b"\r\n"),
        b"f" * 17 + b"\r\n",
        # ends of lines
        *(
            b"1\na\r\n",
            b"1\r\r\na\r\n",
            b"1\rxa\r\n",
            b"0\n\n",
            b"0\r\n\n",
            b"0\r\n\rx",
            b"0\n\r\n",
        ),
        # extensions
        *(b"1;\r\na\r\n", b"1; a\r\na\r\n", b"1;a\na\r\n", b"1;a\x00\r\na\r\n", b"1;\xff\r\n"),
        *(b"1;a=\x01\r\na\r\n", b"1;a=b\na\r\n", b'1;a="\r\na\r\n', b"1;a\rb\r\na\r\n"),
        # data
        *(b"1\r\nab\r\n", b"1\r\na\n0\r\n\r\n", b"1\r\nab\n", b"1\r\na\rx", b"2\r\na\r\n0\r\n\r\n"),
        b"1\r\na0\r\n\r\n",
        # trailers
        *(b"0\r\nX\r\n\r\n", b"0\r\nX : a\r\n\r\n", b"0\r\n X: a\r\n\r\n", b"0\r\nX: a\n\r\n"),
        *(b"0\r\nX: \x01\r\n\r\n", b"0\r\nX: a\r\n b\r\n\r\n", b"0\r\n: a\r\n\r\n"),
        # RFC 9110, section 6.5.1: framing cannot come last
        *(b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\nTransfer-Encoding: chunked\r\n\r\n"),
    ],
)
def test_broken_chunks(text: bytes) -> None:
    assert _is_refused(text)
    assert _is_refused(chunk(b"abc") + text)


def test_what_came_before_a_broken_chunk_was_given() -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(chunk(b"good")) == b"good"
    with pytest.raises(MalformedError, match="chunk size"):
        decoder.feed(b"what\r\n")
    assert not decoder.ended


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"1;", b"a" * 1000),
        (b"1;a=", b"b" * 1000),
        (b'1;a="', b"b" * 1000),
        (b"1", b";a=b" * 250),
        (b"", b"0" * 1000),
        (b"0\r\nX: ", b"a" * 1000),
        (b"0\r\n", b"X" * 1000),
        (b"0\r\n", b"X: a\r\n" * 170),
        (b"0\r\nX:", b" " * 1000),
    ],
)
def test_what_has_no_end_is_refused_and_not_kept(start: bytes, more: bytes) -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(chunk(b"abc") + start) == b"abc"
    tracemalloc.start()
    try:
        for _ in range(FREE_OVERHEAD // len(more)):
            assert decoder.feed(more) == b""
        with pytest.raises(MalformedError, match="more bytes around the chunks than in them"):
            decoder.feed(more)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Twice, as the parser copies what it adds to.
    assert peak < 3 * FREE_OVERHEAD


def test_as_many_chunks_with_extensions_as_there_are() -> None:
    decoder = ChunkedDecoder()
    text = b"1;" + b"a" * 10 + b"\r\nx\r\n"
    for _ in range(2 * FREE_OVERHEAD // len(text)):
        assert decoder.feed(text[:9]) == b""
        assert decoder.feed(text[9:]) == b"x"


def test_a_gap_is_refused_however_it_comes() -> None:
    with pytest.raises(MalformedError):
        ChunkedDecoder().feed(b"1;" + b"a" * 2 * FREE_OVERHEAD + b"\r\nx\r\n")


@pytest.mark.parametrize(
    "behind",
    [
        b"x" * 70_000,
        b"POST / HTTP/1.1\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70_000,
    ],
    ids=["garbage", "request"],
)
def test_much_behind_the_last_chunk(behind: bytes) -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(chunk(b"abc")) == b"abc"
    assert decoder.feed(LAST_CHUNK + behind) == b""
    assert decoder.ended
    assert decoder.rest


@pytest.mark.parametrize(
    "behind",
    [
        b"CONNECT a:80 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
def test_another_protocol_behind_the_last_chunk(behind: bytes) -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(chunk(b"abc") + LAST_CHUNK + behind) == b"abc"
    assert decoder.ended
    assert decoder.rest


@pytest.mark.parametrize("behind", [b"\r\n", b"\n", b"\r", b"\r\n\r\n"])
def test_an_empty_line_behind_the_last_chunk_is_nothing(behind: bytes) -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(chunk(b"abc") + LAST_CHUNK + behind) == b"abc"
    assert decoder.ended
    assert not decoder.rest


@pytest.mark.parametrize("data", [b"x", b"\r\n", b"0123456789abcdef"])
def test_tiny_chunks_are_taken_a_few_at_a_time(data: bytes) -> None:
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
def test_other_chunks_are_taken_at_once(size: int) -> None:
    decoder = ChunkedDecoder()
    count = 1000 * 1024 // size
    assert len(decoder.feed(chunk(bytes(size)) * count)) == size * count
    assert not decoder.rest


def test_requests_behind_the_last_chunk_are_not_copied() -> None:
    decoder = ChunkedDecoder()
    data = chunk(b"abc") + LAST_CHUNK + bytes(100_000)
    assert decoder.feed(data) == b"abc"
    assert isinstance(decoder.rest, memoryview)
    assert decoder.rest.obj is data


# ---------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a", b"1\r\na\r\n"),
        (b"0123456789", b"a\r\n0123456789\r\n"),
        (b"\r\n", b"2\r\n\r\n\r\n"),
        (bytes(65536), b"10000\r\n" + bytes(65536) + b"\r\n"),
    ],
    ids=len,
)
def test_chunks_are_written(data: bytes, text: bytes) -> None:
    assert chunk(data) == text


@LAW
@given(st.lists(st.binary(min_size=1, max_size=300), max_size=5), PLACES)
def test_what_is_written_is_read(pieces: list[bytes], places: list[int]) -> None:
    text = b"".join(map(chunk, pieces)) + LAST_CHUNK
    assert _decode(ChunkedDecoder(), cut(text, places)) == Decoded(b"".join(pieces), True, b"")


# ---------------------------------------------------------------------------------- where it ends

TRAPS = st.lists(
    st.sampled_from([b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"a", b"\r", b"\n", b"0", bytes(9)]),
    min_size=1,
).map(b"".join)


@LAW
@given(
    st.lists(TRAPS, max_size=4),
    st.sampled_from([b"0\r\n", b"000;x=y\r\n", b"0\r\nX: a\r\n", b"0\r\nX: 0\r\nY:\r\n"]),
    st.one_of(st.just(b""), TRAPS),
    PLACES,
)
def test_the_rest_is_what_follows_however_it_comes(
    chunks: list[bytes], last: bytes, behind: bytes, places: list[int]
) -> None:
    data = b"".join(map(chunk, chunks)) + last + b"\r\n" + behind
    decoded = _decode(ChunkedDecoder(), cut(data, places))
    assert decoded.ended
    assert decoded.body == b"".join(chunks)
    assert decoded.rest.lstrip(b"\r\n") == behind.lstrip(b"\r\n")
