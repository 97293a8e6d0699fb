"""Just enough of HTTP/2 for a prepared server and a client that measures: RFC 9113.

Header blocks are written once and never read, so that neither side needs HPACK's state.
"""

from __future__ import annotations

import asyncio
import struct
from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5
DEFAULT_WINDOW, DEFAULT_FRAME_SIZE = 65_535, 16_384
MAX_WINDOW = 2**31 - 1
_HEAD = struct.Struct(">HBBBL")
_HEAD_SIZE = _HEAD.size
_SETTING = struct.Struct(">HL")
_REPLENISH = 2**28
"""Received bytes after which the window of a connection is opened again."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Write a frame: section 4.1."""
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def data_head(size: int, stream: int, flags: int = 0) -> bytes:
    """Write what precedes the payload of DATA."""
    return _HEAD.pack(size >> 8, size & 0xFF, DATA, flags, stream)


def header_block(fields: Sequence[tuple[str, str]]) -> bytes:
    """Write fields as literals that leave no state behind: RFC 7541, section 6.2.2."""
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)


def _string(text: str) -> bytes:
    assert len(text) < 127  # longer ones need more bytes for their length
    return bytes([len(text)]) + text.encode()


def opening(frame_size: int = DEFAULT_FRAME_SIZE) -> bytes:
    """Write the SETTINGS of a peer that never limits the other by its windows."""
    settings = ((INITIAL_WINDOW_SIZE, MAX_WINDOW), (MAX_FRAME_SIZE, frame_size))
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in settings)) + frame(
        WINDOW_UPDATE, 0, 0, (MAX_WINDOW - DEFAULT_WINDOW).to_bytes(4)
    )


def settings_of(payload: bytes) -> dict[int, int]:
    """Read the payload of SETTINGS."""
    return dict(_SETTING.iter_unpack(payload))


class FrameProtocol(asyncio.Protocol):
    """Splits what is received into frames; DATA come in pieces, without padding."""

    def __init__(self) -> None:
        self._rest = b""
        self._data_left = 0
        self._stream, self._ends = 0, False
        self._unacknowledged = 0
        self.output: list[bytes | memoryview] = []
        """What is to be sent after all that was received has been handled."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Split what was received, and send what it makes this side send."""
        if self._rest:
            data = self._rest + data
        at, size = 0, len(data)
        while True:
            if self._data_left:
                end = min(size, at + self._data_left)
                if at == end:
                    break
                self._data_left -= end - at
                self.receive_data(self._stream, data, at, end, self._ends and not self._data_left)
                at = end
                continue
            start = at + _HEAD_SIZE
            if start > size:
                break
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            length = high << 8 | low
            if kind == DATA:
                self._count(length)
                self._stream, self._data_left = stream, length
                self._ends = bool(flags & END_STREAM)
                if not length:
                    self.receive_data(stream, data, start, start, self._ends)
                at = start
                continue
            if start + length > size:
                break
            at = start + length
            self._receive(kind, flags, stream, data[start:at])
        self._rest = data[at:]
        self.flush()

    def flush(self) -> None:
        """Send the output."""
        if self.output:
            self._transport.writelines(self.output)
            self.output = []

    def _count(self, length: int) -> None:
        self._unacknowledged += length
        if self._unacknowledged > _REPLENISH:
            increment = self._unacknowledged.to_bytes(4)
            self.output.append(frame(WINDOW_UPDATE, 0, 0, increment))
            self._unacknowledged = 0

    def _receive(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == PING and not flags & ACK:
            self.output.append(frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            self.output.append(frame(SETTINGS, ACK, 0))
        self.receive_frame(kind, flags, stream, payload)

    @abstractmethod
    def receive_data(self, stream: int, data: bytes, start: int, end: int, ended: bool) -> None:
        """Take a piece of DATA, and whether the stream ends with it."""

    @abstractmethod
    def receive_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Take a frame of any other kind."""
