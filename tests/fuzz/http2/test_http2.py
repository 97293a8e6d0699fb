"""Fuzzing HTTP/2: any bytes give events or one error, wherever they are cut, in both roles."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import hpack
from hyperframe.frame import Frame, GoAwayFrame, WindowUpdateFrame

from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.events import DataReceived, HeadersReceived, StreamReset
from gateway.http2.frames import PREFACE
from gateway.http2.hpack import Decoder, Encoder
from tests.fuzz.broken_bytes import broken, pieces, rounds
from tests.fuzz.http2.streams import REQUEST, any_broken, client_bytes, server_bytes

MAX_STREAMS = 4
MAX_BUFFERED = 200_000
"""Bytes of incomplete frames and header blocks: more than the limits for either."""


class End:
    """An end of a connection that does all that its events call for, and what came of it."""

    def __init__(self, is_client: bool) -> None:
        self._is_client = is_client
        self.connection = Http2Connection(is_client, MAX_STREAMS, clock=lambda: 0.0)
        self.log: list[tuple[Any, ...]] = []
        self.error: Http2Error | None = None
        self.output = b""
        self.requests = 0

    def open_streams(self, count: int) -> list[int]:
        """Send requests."""
        opened = []
        for _ in range(count):
            stream = self.connection.open_stream()
            self.connection.send_headers(stream, REQUEST, False)
            self.connection.send_data(stream, b"body", True)
            opened.append(stream.id)
        self._take()
        return opened

    def feed(self, data: bytes, work: int = 2**31) -> None:
        """Give it bytes, and handle the events, in turns of so much work."""
        self.connection.receive(data)
        try:
            while True:
                self.connection.begin_time_slice(work)
                while (event := self.connection.next_event()) is not None:
                    assert self.error is None
                    self._handle(event)
                if not self.connection.reader.unread:
                    break
        except Http2Error as error:
            assert self.error is None
            self.error = error
        self._take()
        assert len(self.connection.streams) <= MAX_STREAMS
        assert self.connection.reader.size <= MAX_BUFFERED

    def _handle(self, event: Any) -> None:
        if isinstance(event, DataReceived):
            self._receive_data(event)
            return
        stream = getattr(event, "stream", None)
        headers = getattr(event, "headers", None)
        fields = None if headers is None else (headers.fields, headers.too_large)
        self.log.append((type(event).__name__, stream and stream.id, fields))
        if isinstance(event, HeadersReceived):
            self.requests += 1
            self._respond(event.stream)
        elif isinstance(event, StreamReset):
            assert event.stream.id not in self.connection.streams

    def _receive_data(self, event: DataReceived) -> None:
        """Note the data; frames may come in parts."""
        key, before = ("DataReceived", event.stream.id), b""
        if self.log and self.log[-1][:2] == key:
            before = self.log.pop()[2]
        self.log.append((*key, before + bytes(event.data), event.end_stream))
        self.connection.acknowledge(event.stream, event.size)

    def _respond(self, stream: Any) -> None:
        """Respond as a server does: whole, in part, or with a reset."""
        if not self._is_client:
            self.connection.send_headers(stream, ((b":status", b"200"),), False)
            self.connection.send_data(stream, bytes(stream.id % 64 * 1000), stream.id % 3 == 0)
            if stream.id % 5 == 0:
                self.connection.reset(stream, ErrorCode.CANCEL)

    def _take(self) -> None:
        self.output += b"".join(self.connection.take_output())


def frames_of(data: bytes) -> list[Frame]:
    """Parse what an end sent, with another reader; fails for what is no frame."""
    frames = []
    data = data.removeprefix(PREFACE)
    while data:
        frame, size = Frame.parse_frame_header(memoryview(data[:9]))
        assert 9 + size <= len(data)
        frame.parse_body(memoryview(data[9 : 9 + size]))
        frames.append(frame)
        data = data[9 + size :]
    return frames


def without_updates(frames: list[Frame]) -> list[bytes]:
    """Leave out when windows are opened, which depends on the pieces."""
    return [each.serialize() for each in frames if not isinstance(each, WindowUpdateFrame)]


def check(chance: random.Random, make: Callable[[], End], data: bytes) -> End:
    """Feed bytes whole, and in pieces and short turns; check the outcome, and what was sent."""
    whole, cut = make(), make()
    whole.feed(data)
    for piece in pieces(chance, data):
        cut.feed(piece, chance.randint(1, 50))
    assert cut.log == whole.log
    assert (cut.error and cut.error.code) == (whole.error and whole.error.code)
    frames = frames_of(whole.output)
    assert without_updates(frames_of(cut.output)) == without_updates(frames)
    if whole.error is not None:
        assert isinstance(frames[-1], GoAwayFrame)
        assert frames[-1].error_code == whole.error.code
        sent = len(whole.output)
        whole.feed(data)
        assert len(whole.output) == sent
    return whole


def test_frames_to_a_server() -> None:
    def make() -> End:
        return End(is_client=False)

    for chance in rounds(4):
        data, count = client_bytes(chance)
        if chance.randrange(5):
            check(chance, make, any_broken(chance, data))
        elif count <= MAX_STREAMS:
            end = check(chance, make, data)
            assert (end.error, end.requests) == (None, count)


def test_frames_to_a_client() -> None:
    for chance in rounds(4):
        count = chance.randint(1, MAX_STREAMS)

        def make(count: int = count) -> End:
            end = End(is_client=True)
            end.open_streams(count)
            return end

        asked = make()
        data = server_bytes(chance, asked.output, [*asked.connection.streams])
        if chance.randrange(5):
            check(chance, make, any_broken(chance, data))
        else:
            end = check(chance, make, data)
            assert (end.error, end.requests) == (None, count)


# ------------------------------------------------------------------------------- HPACK

NAMES = (b":path", b":status", b"te", b"cookie", b"authorization", b"x-a", b"grpc-timeout", b"x-b")
VALUES = (b"", b"/", b"200", b"POST", b"trailers", b"a" * 70, b"\x00\xff", b"Bearer abc", b"1S")
Fields = tuple[tuple[bytes, bytes], ...]

MAX_BLOCK = 150
"""Bytes of a block, whose indices could be of large fields: no limit may be met."""


def any_fields(chance: random.Random) -> Fields:
    count = chance.randint(1, 6)
    return tuple((chance.choice(NAMES), chance.choice(VALUES)) for _ in range(count))


def as_tuple(fields: Any) -> Fields:
    return tuple((bytes(name), bytes(value)) for name, value in fields)


def decode_with_hpack(decoder: hpack.Decoder, block: bytes) -> Fields | None:
    try:
        return as_tuple(decoder.decode(block, raw=True))
    except hpack.HPACKError:
        return None


def decode(decoder: Decoder, block: bytes) -> Fields | None:
    try:
        return decoder.decode(block).fields
    except Http2Error:
        return None


def test_header_blocks_are_decoded_as_by_another_decoder() -> None:
    for chance in rounds(3):
        encoder, decoder, oracle = hpack.Encoder(), Decoder(), hpack.Decoder()
        for _ in range(chance.randint(1, 8)):
            if not chance.randrange(4):
                encoder.header_table_size = chance.choice([0, 50, 100, 4096])
            block = encoder.encode(any_fields(chance), huffman=chance.random() < 0.5)
            if not chance.randrange(3):
                block = broken(chance, block)
            block = block[:MAX_BLOCK]
            expected = decode_with_hpack(oracle, block)
            assert decode(decoder, block) == expected, block
            if expected is None:
                break


def test_header_blocks_are_decoded_by_another_decoder() -> None:
    for chance in rounds(2):
        encoder, oracle = Encoder(), hpack.Decoder()
        for _ in range(chance.randint(1, 8)):
            if not chance.randrange(4):
                size = chance.choice([0, 50, 100, 4096])
                encoder.limit_table(size)
                oracle.max_allowed_table_size = size
            fields = any_fields(chance)
            assert as_tuple(oracle.decode(encoder.encode(fields), raw=True)) == fields
