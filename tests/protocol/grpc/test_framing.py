from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.error_vocabulary import REQUEST, RESPONSE, ErrorVocabulary
from gateway.protocol.grpc.framing import PREFIX_SIZE, MessagePiece, MessageReader, frame
from tests.support.checks.refused import refused
from tests.support.grpc.wire_bytes import cuts
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300))
CAP = 100
CAP_NAME = "limits.max_request_bytes"

MESSAGES = st.lists(st.tuples(st.booleans(), st.binary(max_size=30)), max_size=5)


def make_reader(words: ErrorVocabulary = REQUEST, cap: int = CAP) -> MessageReader:
    return MessageReader(cap, CAP_NAME, words)


def pieces_of(reader: MessageReader, body: bytes) -> Iterator[MessagePiece]:
    """Feed a piece of a body, and yield the pieces of messages in it."""
    reader.feed(body)
    while (piece := reader.next_piece()) is not None:
        yield piece


def feed(reader: MessageReader, body: bytes) -> list[tuple[bytes, int, bool, bool, bool]]:
    """Feed a piece; return the pieces of messages as plain tuples."""
    return [
        (bytes(each.data), each.size, each.is_compressed, each.begins, each.ends)
        for each in pieces_of(reader, body)
    ]


def read_whole(reader: MessageReader, body: bytes) -> None:
    feed(reader, body)
    reader.end()


def write(messages: list[tuple[bool, bytes]]) -> bytes:
    return b"".join(frame(len(data), flag) + data for flag, data in messages)


class Collector:
    """Puts the pieces of messages together, and checks each of them."""

    def __init__(self) -> None:
        self.messages: list[tuple[bool, bytes]] = []
        self._open: MessagePiece | None = None
        self._data = b""

    def add(self, piece: MessagePiece) -> None:
        assert piece.begins == (self._open is None)
        if piece.begins:
            self._data = b""
        else:
            assert self._open is not None
            assert (piece.size, piece.is_compressed) == (self._open.size, self._open.is_compressed)
            assert piece.data
        self._data += piece.data
        assert piece.ends == (len(self._data) == piece.size)
        self._open = None if piece.ends else piece
        if piece.ends:
            self.messages.append((piece.is_compressed, self._data))


def read(pieces: list[bytes], reader: MessageReader) -> tuple[list[tuple[bool, bytes]], str]:
    """Return the messages of a body, and the error that ends it."""
    found = Collector()
    try:
        for piece in pieces:
            for each in pieces_of(reader, piece):
                found.add(each)
        reader.end()
    except GatewayError as error:
        return found.messages, error.message
    return found.messages, ""


@pytest.mark.parametrize(
    ("size", "is_compressed", "prefix"),
    [(0, False, b"\0\0\0\0\0"), (2**32 - 1, True, b"\1\xff\xff\xff\xff")],
)
def test_prefix_is_flag_and_big_endian_length(
    size: int, is_compressed: bool, prefix: bytes
) -> None:
    assert frame(size, is_compressed) == prefix
    assert len(prefix) == PREFIX_SIZE


@LAW
@given(st.data(), MESSAGES, st.binary(max_size=12))
def test_error_and_messages_before_it_do_not_depend_on_cuts(
    data: st.DataObject, messages: list[tuple[bool, bytes]], end: bytes
) -> None:
    body = write(messages) + end
    reader = make_reader()
    expected = read([body], reader)
    if not end:
        assert (expected, reader.messages) == ((messages, ""), len(messages))
    assert expected[0][: len(messages)] == messages
    assert read(data.draw(cuts(body)), make_reader()) == expected
    assert read([bytes([byte]) for byte in body], make_reader()) == expected


def test_size_of_a_message_is_known_before_its_data() -> None:
    reader = make_reader()
    assert feed(reader, frame(7)[:4]) == []
    assert feed(reader, frame(7)[4:]) == [(b"", 7, False, True, False)]
    assert feed(reader, b"abc") == [(b"abc", 7, False, False, False)]
    assert feed(reader, b"defg") == [(b"defg", 7, False, False, True)]
    reader.end()


@pytest.mark.parametrize(
    ("body", "request_kind", "error"),
    [
        (
            b"\2\0\0\0\0",
            ErrorKind.BAD_REQUEST,
            "has the flag 2 before a gRPC message; it is 0, or 1 for a compressed message",
        ),
        (
            b"\0\0\0\0\0\1\0\0\0",
            ErrorKind.BAD_REQUEST,
            "ends within the 5 bytes before a gRPC message",
        ),
        (b"\0\0\0\0\3ab", ErrorKind.BAD_REQUEST, "ends after 2 of 3 bytes of a gRPC message"),
        (
            frame(CAP + 1),
            ErrorKind.TOO_LARGE,
            f"has a gRPC message of 101 bytes, which is larger than 100 bytes ({CAP_NAME})",
        ),
    ],
)
def test_invalid_body_is_the_fault_of_who_sent_it(
    body: bytes, request_kind: ErrorKind, error: str
) -> None:
    with refused(request_kind, f"the request {error}"):
        read_whole(make_reader(REQUEST), body)
    with refused(ErrorKind.BAD_RESPONSE, f"the server's response {error}"):
        read_whole(make_reader(RESPONSE), body)
    assert feed(make_reader(), frame(CAP)) == [(b"", CAP, False, True, False)]


def test_reader_buffers_no_data() -> None:
    piece = bytes(64 * 1024)
    reader = make_reader(cap=2**32 - 1)
    feed(reader, frame(2**32 - 1))
    tracemalloc.start()
    try:
        for _ in range(100):
            for each in pieces_of(reader, piece):
                assert isinstance(each.data, memoryview)
                assert each.data.obj is piece
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * 1024
