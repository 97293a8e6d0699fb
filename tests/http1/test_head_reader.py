from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http1.head import MAX_HEAD, HeadParser, HeadReader, MalformedError
from tests.http1.heads import ALMOST_HEADS, HOST, head_text, heads
from tests.http1.splits import LAW, PLACES, all_splits, bytewise, cut

TOO_LARGE = "a head of more than 65536 bytes"


def _read(is_request: bool, pieces: list[bytes]) -> tuple[bytes, bytes] | str | None:
    """Return a valid head and the rest; what is wrong with it; or None if the head is partial.

    How much of a line has come decides what is said of it, but not of a head that is too large.
    """
    reader = HeadReader(is_request)
    try:
        for number, piece in enumerate(pieces):
            if (found := reader.feed(piece)) is not None:
                text, rest = found
                if is_request:
                    HeadParser().parse_request(text)
                else:
                    HeadParser().parse_response(text, "POST")
                return text, bytes(rest) + b"".join(pieces[number + 1 :])
    except MalformedError as error:
        return str(error) if str(error) == TOO_LARGE else "malformed"
    return None


READERS = pytest.mark.parametrize("is_request", [True, False])


@READERS
@LAW
@given(text=st.one_of(heads(), ALMOST_HEADS), places=PLACES)
@example(text=b"GET / HTTP/1.1\r\n\r\n\r\n\r\n", places=[16, 17, 18, 19, 20])
@example(text=b"GET /\n\r\n\r\n", places=[6, 8])
@example(text=b"\r\n\r\nHTTP/1.1 200 OK\r\n\r\nX", places=[1, 2, 3, 4])
def test_heads_do_not_depend_on_how_bytes_arrive(
    is_request: bool, text: bytes, places: list[int]
) -> None:
    whole = _read(is_request, [text])
    assert _read(is_request, cut(text, places)) == whole
    assert _read(is_request, bytewise(text)) == whole


@pytest.mark.parametrize(
    ("is_request", "first"), [(True, b"GET /x HTTP/1.1"), (False, b"HTTP/1.1 200 OK")]
)
@pytest.mark.parametrize("before", [b"", b"\r\n", b"\n\n", b"\r\n\r\n\r\n"])
@pytest.mark.parametrize("rest", [b"", b"\r\n", b"rest", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_reader_separates_head_and_rest(
    is_request: bool, first: bytes, before: bytes, rest: bytes
) -> None:
    text = head_text(HOST, b"X: a", b"Y:", first=first)
    for pieces in all_splits(before + text + rest):
        assert _read(is_request, pieces) == (text, rest)


def test_reader_reads_severalheads() -> None:
    reader = HeadReader(is_request=True)
    one, other = head_text(b"X: 1"), head_text(b"X: 2")
    found = reader.feed(one + other + one[:9])
    assert found == (one, other + one[:9])
    assert reader.feed(found[1]) == (other, one[:9])
    assert reader.feed(one[:9]) is None
    assert reader.feed(one[9:]) == (one, b"")


@pytest.mark.parametrize(
    ("is_request", "start", "garbage"),
    [
        (True, b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        (True, b"", b"{"),
        (True, b"", b"get / HTTP/1.1"),
        (True, b"S", b"SH-2.0-OpenSSH_9.6\r\n"),
        (True, b"", b"HTTP/1.1 200 OK"),
        (True, b"GET / HTTP/1.1", b"\n"),
        (True, b"GET / HTTP/1.1\r\n", b" \r\n"),
        (True, b"GET / HTTP/1.1\r\nX: a", b"\x00\r\n"),
        (True, b"GET / HTTP/1.1\r\nX: a\r\nContent-Length: ", b"x\r\n"),
        (False, b"", b"\x15\x03\x01\x00\x02\x02\x46"),
        (False, b"", b"<html>"),
        (False, b"HTTP/1.1 ", b"x"),
        (False, b"HTTP/1.1 200 OK", b"\n"),
        (False, b"HTTP/1.1 200 OK\r\nX: a", b"\x7f\r\n"),
    ],
)
def test_garbage_is_rejected_before_the_head_is_complete(
    is_request: bool, start: bytes, garbage: bytes
) -> None:
    for place in range(len(start) + 1):
        reader = HeadReader(is_request)
        assert reader.feed(start[:place]) is None
        assert reader.feed(start[place:]) is None
        with pytest.raises(MalformedError):
            reader.feed(garbage)


def _of_size(size: int) -> bytes:
    text = head_text(HOST, b"X: ")
    return head_text(HOST, b"X: " + b"a" * (size - len(text)))


@pytest.mark.parametrize("size", [MAX_HEAD - 1, MAX_HEAD])
@pytest.mark.parametrize("rest", [b"", b"rest", b"\r\n\r\n"])
def test_head_of_the_maximum_size_is_accepted(size: int, rest: bytes) -> None:
    text = _of_size(size)
    for place in (0, 1, 40_000, *range(size - 6, size)):
        assert _read(True, cut(text + rest, [place])) == (text, rest)


@pytest.mark.parametrize(
    "text", [_of_size(MAX_HEAD + 1), _of_size(MAX_HEAD + 3), _of_size(3 * MAX_HEAD)]
)
def test_head_over_the_maximum_size_is_rejected(text: bytes) -> None:
    for place in (0, 1, 40_000, *range(MAX_HEAD - 6, MAX_HEAD + 1)):
        assert _read(True, cut(text, [place])) == TOO_LARGE


@pytest.mark.parametrize("line", [b"X: a\r\n", b"X: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
def test_endless_head_is_rejected(line: bytes) -> None:
    reader = HeadReader(is_request=True)
    reader.feed(b"GET / HTTP/1.1\r\n")
    received = 16
    while received + len(line) < MAX_HEAD:
        assert reader.feed(line) is None
        received += len(line)
    with pytest.raises(MalformedError, match=TOO_LARGE):
        reader.feed(line)


def test_empty_lines_before_a_head_are_not_buffered() -> None:
    reader = HeadReader(is_request=True)
    for empty in (b"", b"\r", b"\n", *[b"\r\n" * 1000] * 100):
        assert reader.feed(empty) is None
        assert not reader.received
    assert reader.feed(b"G") is None
    assert reader.received == b"G"


def _only_malformed(call: Callable[..., object], *args: object) -> None:
    with suppress(MalformedError):
        call(*args)


@LAW
@given(st.one_of(st.binary(max_size=60), ALMOST_HEADS, heads()), PLACES)
def test_parsing_raises_only_malformed_error(text: bytes, places: list[int]) -> None:
    _only_malformed(HeadParser().parse_request, text)
    for method in ("GET", "HEAD"):
        _only_malformed(HeadParser().parse_response, text, method)
    for is_request in (True, False):
        reader = HeadReader(is_request)
        for piece in cut(text, places):
            _only_malformed(reader.feed, piece)
