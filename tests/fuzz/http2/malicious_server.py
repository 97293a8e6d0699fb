"""A gRPC server that sends any frames, in any order, whatever its clients have asked."""

from __future__ import annotations

import random
from collections.abc import Callable

import hpack

from tests.fuzz.broken_bytes import broken
from tests.support.servers.scripted_server import Connection

Fields = list[tuple[bytes, bytes]]

_END_STREAM, _END_HEADERS, _PADDED, _ACK = 1, 4, 8, 1
_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH_PROMISE = range(6)
_PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(6, 10)

_HEAD: Fields = [(b":status", b"200"), (b"content-type", b"application/grpc")]
_OK: Fields = [(b"grpc-status", b"0")]
_MESSAGE = b"\0\0\0\0\3\x0a\x01m"

_ODD_FIELDS: Fields = [
    (b"", b""),
    (b"", b"x"),
    (b":", b"x"),
    (b":status", b"200"),
    (b":status", b""),
    (b":path", b"/"),
    (b"Upper", b"x"),
    (b"x y", b"z"),
    (b"connection", b"close"),
    (b"transfer-encoding", b"chunked"),
    (b"te", b"gzip"),
    (b"content-length", b"3"),
    (b"content-length", b"-1"),
    (b"content-length", b"9" * 30),
    (b"content-type", b"text/html"),
    (b"content-encoding", b"gzip"),
    (b"grpc-encoding", b"gzip"),
    (b"grpc-encoding", b"\xff"),
    (b"grpc-status", b"x"),
    (b"grpc-status", b""),
    (b"grpc-status", b"5" * 5000),
    (b"grpc-status", b"007"),
    (b"grpc-status", b"77"),
    (b"grpc-message", b" %zz%ff "),
    (b"grpc-message", b"m" * 10_000),
    (b"x-a", b"\0"),
    (b"x-a", b"\r\nx: y"),
    (b"x-a", b"\xff\xfe"),
    (b"x-a", b" x "),
    (b"trailer", b"x"),
    (b"via", b"1.1 gateway"),
    (b"date", b"x"),
]
_STATUSES = (b"200", b"100", b"101", b"103", b"199", b"204", b"304", b"404", b"503", b"999")
_SETTING_VALUES = (0, 1, 100, 16_384, 65_535, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1)
_CODES = (0, 1, 2, 5, 7, 8, 11, 13, 14, 77, 2**32 - 1)


class MaliciousPlay:
    """What it does on one connection; ``chance`` decides, so that the same seed does the same."""

    def __init__(self, connection: Connection, chance: random.Random) -> None:
        self._connection = connection
        self._chance = chance
        self._encoder = hpack.Encoder()
        self._stream_id = 0
        self._moves: list[tuple[Callable[[], bytes], int]] = [
            (self._right, 8),
            (self._headers, 8),
            (self._data, 6),
            (self._trailers, 6),
            (self._too_large, 2),
            (self._reset, 2),
            (self._goaway, 2),
            (self._settings, 2),
            (self._window, 2),
            (self._ping, 2),
            (self._any_frame, 2),
        ]

    async def run(self) -> None:
        """Play until the client leaves, or this server does."""
        chance = self._chance
        if chance.random() < 0.03:
            await self._send(chance.randbytes(chance.randrange(60)))
        await self._send(
            _frame(_SETTINGS, 0, 0, b"") if chance.random() < 0.8 else self._settings()
        )
        if chance.random() < 0.05:
            await self._send(self._goaway() + self._ping())
        while await self._next_request():
            moves, weights = zip(*self._moves, strict=True)
            count = chance.choice([1, 1, 2, 3, 5])
            data = b"".join(move() for move in chance.choices(moves, weights, k=count))
            if chance.random() < 0.1:
                data = broken(chance, data)
            await self._send(data)
            ending = chance.random()
            if ending < 0.1:
                return
            if ending < 0.15:
                self._connection.reset()
                return

    async def _next_request(self) -> bool:
        """Read until a request has begun; return whether there was one."""
        reader = self._connection.reader
        if not self._stream_id:
            await reader.readexactly(24)  # the preface
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3]))
            if head[3] == _HEADERS:
                self._stream_id = int.from_bytes(head[5:])
                return True

    async def _send(self, data: bytes) -> None:
        while data:
            size = len(data) if self._chance.random() < 0.7 else self._chance.randrange(1, 50)
            await self._connection.send(data[:size])
            data = data[size:]

    def _block(self, fields: Fields) -> bytes:
        return self._encoder.encode(fields)

    def _any_stream(self) -> int:
        last = self._stream_id
        return last if self._chance.random() < 0.9 else self._chance.choice([0, 1, 2, last + 2])

    def _flags(self, chance_of_end: float) -> int:
        return _END_HEADERS | (_END_STREAM if self._chance.random() < chance_of_end else 0)

    def _odd(self, fields: Fields) -> Fields:
        """Add, drop or move fields."""
        chance, fields = self._chance, list(fields)
        for _ in range(chance.choice([0, 0, 1, 1, 2, 4])):
            fields.insert(chance.randrange(len(fields) + 1), chance.choice(_ODD_FIELDS))
        if chance.random() < 0.1:
            del fields[chance.randrange(len(fields))]
        return fields

    def _right(self) -> bytes:
        stream_id = self._stream_id
        return (
            _frame(_HEADERS, _END_HEADERS, stream_id, self._block(_HEAD))
            + _frame(_DATA, 0, stream_id, _MESSAGE)
            + _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream_id, self._block(_OK))
        )

    def _headers(self) -> bytes:
        head = list(_HEAD)
        if self._chance.random() < 0.3:
            head[0] = (b":status", self._chance.choice(_STATUSES))
        return _frame(_HEADERS, self._flags(0.2), self._any_stream(), self._block(self._odd(head)))

    def _too_large(self) -> bytes:
        """Send few bytes that become a list of more than 64 KiB, perhaps with odd fields."""
        fields = self._odd([*(_HEAD if self._chance.random() < 0.7 else _OK)])
        fields += [(b"x-long", b"v" * 3900)] * 17
        if self._chance.random() < 0.5:
            fields.append((b"", b""))
        return _frame(_HEADERS, self._flags(0.5), self._any_stream(), self._block(fields))

    def _data(self) -> bytes:
        data = self._chance.choice([b"", _MESSAGE, _MESSAGE[:6], b"\xff" * 20, bytes(20_000)])
        flags = _END_STREAM if self._chance.random() < 0.3 else 0
        if self._chance.random() < 0.2:
            padding = self._chance.randrange(300) % 256
            return _frame(
                _DATA, flags | _PADDED, self._any_stream(), bytes([padding]) + data + bytes(padding)
            )
        return _frame(_DATA, flags, self._any_stream(), data)

    def _trailers(self) -> bytes:
        return _frame(_HEADERS, self._flags(0.8), self._any_stream(), self._block(self._odd(_OK)))

    def _reset(self) -> bytes:
        code = self._chance.choice(_CODES)
        return _frame(_RST_STREAM, 0, self._any_stream(), code.to_bytes(4))

    def _goaway(self) -> bytes:
        chance, last = self._chance, self._stream_id
        last_id = chance.choice([0, max(0, last - 2), last, 2**31 - 1])
        debug = chance.choice([b"", b"too_many_pings", b"\xff\n\0" * 100])
        payload = last_id.to_bytes(4) + chance.choice(_CODES).to_bytes(4) + debug
        return _frame(_GOAWAY, 0, 0, payload) + (self._ping() if chance.random() < 0.5 else b"")

    def _settings(self) -> bytes:
        chance = self._chance
        values = [
            chance.randrange(1, 8).to_bytes(2) + chance.choice(_SETTING_VALUES).to_bytes(4)
            for _ in range(chance.randrange(4))
        ]
        flags = _ACK if chance.random() < 0.2 else 0
        return _frame(_SETTINGS, flags, 0, b"".join(values))

    def _window(self) -> bytes:
        increment = self._chance.choice([0, 1, 1000, 2**31 - 1])
        stream_id = self._chance.choice([0, self._stream_id])
        return _frame(_WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))

    def _ping(self) -> bytes:
        return _frame(_PING, _ACK if self._chance.random() < 0.3 else 0, 0, b"12345678")

    def _any_frame(self) -> bytes:
        chance = self._chance
        kind = chance.choice([_PRIORITY, _PUSH_PROMISE, _CONTINUATION, *range(12)])
        data = chance.randbytes(chance.choice([0, 1, 4, 5, 8, 40]))
        return _frame(kind, chance.randrange(256), self._any_stream(), data)


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream_id.to_bytes(4) + payload
