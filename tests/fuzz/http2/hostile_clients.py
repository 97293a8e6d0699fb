"""What hostile HTTP/2 clients send, by chance: valid frames that cost, and broken ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from gateway.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    encode_data_header,
    encode_rst_stream,
    encode_settings,
)
from tests.fuzz.http2.streams import any_broken, client_bytes
from tests.http1.splits import cut
from tests.http2.frame_bytes import frame

_MAX_FRAME = 16_384
NEWEST = 0xBE
"""The newest field of the dynamic table, in one byte: RFC 7541, section 6.1."""

_NAMES = (b"x-a", b"cookie", b"host", b"content-length", b"te", b"connection", b"grpc-timeout")
ODD_NAMES = (b"", b":", b":x", b":path", b"X", b" ", b"\0", b"a b", b"\xff", b"-" * 3000)
_ODD_VALUES = (b"", b" ", b"\0", b"a\r\nb: c", b"\xff", b"9" * 5000, b"chunked", b"100-continue")
_PATHS = (b"/v2/x", b"/v2/models/m/infer", b"/v2/health/live", b"/inference.GRPCInferenceService/x")

_LENGTHS = (b"0", b"1", b"5", b"70000", b"-1", b"x", b"9" * 30)


@dataclass(frozen=True)
class HostileClient:
    """What a client sends, in which pieces, and how it leaves: before or after it reads."""

    pieces: tuple[bytes, ...]
    reads: bool
    resets: bool


def hostile_client(chance: random.Random) -> HostileClient:
    """Return any client."""
    if chance.randrange(5):
        data = _Attack(chance).frames()
    else:
        data, _ = client_bytes(chance)
        data = any_broken(chance, data)
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.choice([0, 0, 1, 3])))
    return HostileClient(tuple(cut(data, cuts)), chance.random() < 0.5, chance.random() < 0.5)


class _Attack:
    """Writes the frames of one connection: a few attacks in a row."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._next_stream = 1
        self._out = [PREFACE, encode_settings([])]

    def frames(self) -> bytes:
        """Return all frames."""
        kinds: list[Callable[[], None]] = [
            self._burst,
            self._burst,
            self._unfinished_head,
            self._go_away,
            self._small_data,
            self._resets,
            self._control,
        ]
        for _ in range(self._chance.randint(1, 4)):
            self._chance.choice(kinds)()
        return b"".join(self._out)

    def _burst(self) -> None:
        """Open many streams at once, with heads of any size and any odd field."""
        chance = self._chance
        table = chance.random() < 0.7
        if table:  # a field that each block below repeats, in a byte each time
            size = chance.choice([100, 1000, 3900])
            self._open(_request(chance) + literal(_name(chance), b"v" * size, indexed=True))
        for _ in range(chance.choice([1, 2, 10, 99])):
            block = _request(chance)
            for _ in range(chance.randrange(3)):
                block += literal(_name(chance), _value(chance))
            if table:
                block += bytes([NEWEST]) * chance.choice([0, 1, 17, 17, 100, 700])
            self._open(block, chance.choice([0, END_STREAM]))

    def _open(self, block: bytes, flags: int = END_STREAM) -> None:
        """Send a header block, in several frames if it must."""
        first, rest = block[:_MAX_FRAME], block[_MAX_FRAME:]
        last = 0 if rest else END_HEADERS
        self._out.append(frame(HEADERS, flags | last, self._next_stream, first))
        while rest:
            piece, rest = rest[:_MAX_FRAME], rest[_MAX_FRAME:]
            last = 0 if rest else END_HEADERS
            self._out.append(frame(CONTINUATION, last, self._next_stream, piece))
        self._next_stream += 2

    def _unfinished_head(self) -> None:
        """Begin a header block, and go on with it for a while, without its end."""
        chance = self._chance
        stream = self._next_stream
        self._out.append(frame(HEADERS, chance.choice([0, END_STREAM]), stream, _request(chance)))
        size = chance.choice([0, 1, 100, _MAX_FRAME])
        for _ in range(chance.choice([0, 1, 6, 7, 40])):
            self._out.append(frame(CONTINUATION, 0, stream, bytes([NEWEST]) * size))
        self._next_stream += 2
        if not chance.randrange(3):
            self._out.append(frame(CONTINUATION, END_HEADERS, stream))

    def _go_away(self) -> None:
        """Leave, and send more in the same packet."""
        last, code = (self._chance.choice([0, 1, 2**31 - 1]).to_bytes(4, "big") for _ in range(2))
        self._out.append(frame(GOAWAY, 0, 0, last + code + self._chance.randbytes(3)))
        for _ in range(self._chance.randrange(3)):
            self._control()

    def _small_data(self) -> None:
        """Send a body in tiny frames, to the last stream or to none."""
        chance = self._chance
        stream = self._next_stream
        self._open(_request(chance), 0)
        for _ in range(chance.choice([1, 10, 500])):
            self._out += [encode_data_header(stream, 1, False), b"x"]
        if chance.randrange(2):
            self._out.append(encode_data_header(stream, 0, True))

    def _resets(self) -> None:
        """Open streams, and reset each at once."""
        for _ in range(self._chance.choice([1, 10, 300])):
            stream = self._next_stream
            self._open(_request(self._chance), self._chance.choice([0, END_STREAM]))
            self._out.append(encode_rst_stream(stream, self._chance.choice([0, 2, 8])))

    def _control(self) -> None:
        """Send a frame that wants a response, or changes a window or a setting."""
        chance = self._chance
        stream = chance.choice([0, 0, 1, max(1, self._next_stream - 2), self._next_stream])
        self._out.append(
            chance.choice(
                [
                    frame(PING, 0, 0, bytes(8)),
                    frame(PING, 1, 0, bytes(8)),
                    frame(SETTINGS, 0, 0),
                    encode_settings([(4, chance.choice([0, 1, 2**31 - 1]))]),
                    encode_settings([(1, chance.choice([0, 100, 2**20]))]),
                    frame(WINDOW_UPDATE, 0, stream, chance.choice([0, 1, 2**31 - 1]).to_bytes(4)),
                    frame(PRIORITY, 0, stream or 1, bytes(5)),
                    frame(RST_STREAM, 0, stream or 1, bytes(4)),
                    frame(DATA, chance.choice([0, END_STREAM]), stream or 1, b"x"),
                ]
            )
        )


def _request(chance: random.Random) -> bytes:
    """Write a request's fields, which may lack one, repeat one, or have an odd one."""
    fields = [
        literal(b":method", chance.choice([b"GET", b"POST", b"HEAD"])),
        literal(b":scheme", b"http"),
        literal(b":path", chance.choice(_PATHS)),
        literal(b":authority", b"a.test"),
    ]
    if not chance.randrange(6):
        fields.append(literal(b"content-length", chance.choice(_LENGTHS)))
    if not chance.randrange(6):
        fields.append(literal(b"content-type", b"application/grpc"))
    if not chance.randrange(12):
        del fields[chance.randrange(len(fields))]
    if not chance.randrange(12):
        fields.append(chance.choice(fields))
    return b"".join(fields)


def _name(chance: random.Random) -> bytes:
    return chance.choice(_NAMES if chance.randrange(2) else ODD_NAMES)


def _value(chance: random.Random) -> bytes:
    return chance.choice(_ODD_VALUES) if chance.randrange(2) else b"v" * chance.choice([1, 300])


def literal(name: bytes, value: bytes, *, indexed: bool = False) -> bytes:
    """Write a field with its name: RFC 7541, section 6.2.1 if indexed, else section 6.2.2."""
    return b"%c%b%b" % (0x40 if indexed else 0, _string(name), _string(value))


def _string(data: bytes) -> bytes:
    """Write a string without Huffman coding: sections 5.1 and 5.2."""
    size = len(data)
    if size < 127:
        return bytes([size]) + data
    head, size = [127], size - 127
    while size >= 128:
        head.append(size % 128 + 128)
        size //= 128
    return bytes([*head, size]) + data
