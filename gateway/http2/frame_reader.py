"""Reads the frames of HTTP/2 from received bytes: RFC 9113, sections 4 and 6.

It checks what needs no state of streams. What it buffers is bounded, whatever the peer announces.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_SIZE,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_MAX_FRAME_SIZE,
    MAX_WINDOW_SIZE,
    MIN_MAX_FRAME_SIZE,
    PADDED,
    PING,
    PRIORITY,
    PRIORITY_FLAG,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeaderBlockFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    UnknownFrame,
    WindowUpdateFrame,
)

MAX_HEADER_BLOCK: Final = 128 * 1024
"""Maximum bytes of a header block: twice those of a header list, so that a list that is a little
too large is refused without closing the connection."""

MAX_CONTINUATIONS: Final = 8
"""Maximum CONTINUATION frames of a header block: as many as hold the maximum block."""

MAX_CONTROL_PAYLOAD: Final = 16 * 1024
"""Maximum bytes of SETTINGS or GOAWAY, however large frames may be."""

_MAX_COPY: Final = 16 * 1024
"""Data of at most so many bytes are copied: a small view would pin a large read buffer."""

_WORD: Final = Struct(">L")
_TWO_WORDS: Final = Struct(">LL")
_SETTING: Final = Struct(">HL")

_NAMES: Final = (
    *("DATA", "HEADERS", "PRIORITY", "RST_STREAM", "SETTINGS", "PUSH_PROMISE", "PING", "GOAWAY"),
    *("WINDOW_UPDATE", "CONTINUATION"),
)
_OF_STREAMS: Final = frozenset([DATA, HEADERS, PRIORITY, RST_STREAM, PUSH_PROMISE, CONTINUATION])
_OF_CONNECTION: Final = frozenset([SETTINGS, PING, GOAWAY])
_FIXED_LENGTHS: Final = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}

# What comes next.
_HEADER: Final = 0
_PAYLOAD: Final = 1  # buffered until it is complete
_PAD_LENGTH: Final = 2  # of DATA
_DATA: Final = 3
_UNKNOWN: Final = 4
_SKIPPED: Final = 5

_STREAM_BITS: Final = 0x7FFFFFFF
"""All but the reserved bit, which is ignored: section 4.1."""


class FrameReader:
    """Reads frames; ``max_frame_size`` is the announced SETTINGS_MAX_FRAME_SIZE.

    Feed it what was received, then take frames until there is none. After a connection error it
    must not be used; after a stream error the next frame can be read.
    """

    def __init__(self, max_frame_size: int = MIN_MAX_FRAME_SIZE) -> None:
        self.max_frame_size = max_frame_size
        self._received: bytes | memoryview = b""
        self._start = 0
        self._partial = bytearray()
        self._next = _HEADER
        # The current frame.
        self._kind = 0
        self._flags = 0
        self._stream_id = 0
        self._left = 0
        self._padding_left = 0
        self._overhead = 0
        # The header block that is not complete.
        self._open: HeaderBlockFrame | None = None
        self._fragments: list[bytes] = []
        self._block_size = 0

    @property
    def size(self) -> int:
        """The buffered bytes of incomplete frames and header blocks."""
        return len(self._partial) + self._block_size

    @property
    def unread(self) -> int:
        """The bytes that were fed and not read yet; 0 once ``next_frame`` has returned None."""
        return len(self._received) - self._start

    def drop(self) -> None:
        """Drop all that was fed, and not made into a frame yet."""
        self._received, self._start = b"", 0
        self._partial = bytearray()
        self._fragments = []
        self._block_size = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Add received data."""
        if self._start < len(self._received):
            data = b"".join([self._received[self._start :], data])
        self._received = data
        self._start = 0

    def next_frame(self) -> Frame | None:
        """Return the next frame, None if it is not complete.

        DATA frames come in pieces, as their data arrive. Raises Http2Error.
        """
        frame = self._read_frame()
        if frame is None:
            self._received, self._start = b"", 0  # a view would pin its slab
        return frame

    def _read_frame(self) -> Frame | None:
        while True:
            if self._next == _HEADER and not self._read_header():
                return None
            if self._next == _DATA:
                return self._read_data()
            if self._next == _PAYLOAD:
                payload = self._take(self._left)
                if payload is None:
                    return None
                self._next = _HEADER
                frame = self._parse(payload)
                if frame is not None:
                    return frame
            elif self._next == _UNKNOWN:
                self._next = _SKIPPED
                return UnknownFrame(self._stream_id, self._kind, self._left)
            elif not (self._skip() if self._next == _SKIPPED else self._read_pad_length()):
                return None

    def _take(self, size: int) -> bytes | None:
        """Return the next bytes, None while they are not complete."""
        partial = self._partial
        end = self._start + size - len(partial)
        if end > len(self._received):
            partial += self._received[self._start :]
            self._start = len(self._received)
            return None
        taken = bytes(self._received[self._start : end])
        self._start = end
        if partial:
            taken = bytes(partial) + taken
            self._partial = bytearray()
        return taken

    def _skip(self) -> bool:
        """Drop the rest of a frame as it arrives; return whether that was all."""
        count = min(self._left, len(self._received) - self._start)
        self._start += count
        self._left -= count
        if self._left:
            return False
        self._next = _HEADER
        return True

    def _read_header(self) -> bool:
        """Read and check the header of a frame; return whether it was complete."""
        if not self._partial and len(self._received) - self._start >= FRAME_HEADER_SIZE:
            header = FRAME_HEADER.unpack_from(self._received, self._start)
            self._start += FRAME_HEADER_SIZE
        else:
            taken = self._take(FRAME_HEADER_SIZE)
            if taken is None:
                return False
            header = FRAME_HEADER.unpack(taken)
        high, low, kind, flags, word = header
        length: int = high << 16 | low
        stream_id: int = word & _STREAM_BITS
        self._left = length
        self._kind = kind
        self._flags = flags
        self._stream_id = stream_id
        if length > self.max_frame_size:
            # Section 4.2. For DATA a stream error would do, but then it had to be skipped.
            raise Http2Error(
                ErrorCode.FRAME_SIZE_ERROR,
                f"a frame of {length} bytes, where {self.max_frame_size} are allowed",
            )
        self._check_order(kind, stream_id)
        if kind == DATA:
            self._overhead = self._padding_left = 0
            self._next = _PAD_LENGTH if flags & PADDED else _DATA
            if flags & PADDED and not length:
                raise _too_short(kind)
        elif kind > CONTINUATION:
            self._next = _UNKNOWN
        else:
            self._next = _PAYLOAD
            self._check_length(kind, length)
        return True

    def _check_order(self, kind: int, stream_id: int) -> None:
        """Check that a frame may come here, and its stream id."""
        if self._open is not None:
            # Sections 4.3, 5.5 and 6.10: also no unknown frame, and no other stream.
            if kind != CONTINUATION or stream_id != self._open.stream_id:
                raise _protocol_error("another frame within a header block")
        elif kind == CONTINUATION:
            raise _protocol_error("CONTINUATION without a header block")  # section 6.10
        if stream_id:
            if kind in _OF_CONNECTION:
                raise _protocol_error(f"{_NAMES[kind]} on a stream")  # sections 6.5, 6.7, 6.8
        elif kind in _OF_STREAMS:
            raise _protocol_error(f"{_NAMES[kind]} on stream 0")  # sections 6.1 to 6.6, 6.10

    def _check_length(self, kind: int, length: int) -> None:
        """Check the length of a frame that will be buffered."""
        expected = _FIXED_LENGTHS.get(kind)
        if expected is not None:
            if length != expected:
                reason = f"{_NAMES[kind]} of {length} bytes"
                if kind == PRIORITY:
                    self._next = _SKIPPED
                    # Section 6.3: only the stream is in error.
                    raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, reason, self._stream_id)
                # Sections 6.4, 6.7 and 6.9.
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, reason)
        elif kind in (SETTINGS, GOAWAY):
            if length > MAX_CONTROL_PAYLOAD:
                raise _flood(f"{_NAMES[kind]} of more than {MAX_CONTROL_PAYLOAD} bytes")
        elif self._block_size + length > MAX_HEADER_BLOCK:
            raise _flood(f"a header block of more than {MAX_HEADER_BLOCK} bytes")
        elif len(self._fragments) > MAX_CONTINUATIONS:
            raise _flood(f"more than {MAX_CONTINUATIONS} CONTINUATION frames")

    def _read_pad_length(self) -> bool:
        """Read the length of the padding of DATA: section 6.1."""
        if self._start == len(self._received):
            return False
        padding = self._received[self._start]
        self._start += 1
        self._left -= 1 + padding
        if self._left < 0:
            raise _protocol_error("padding of the length of its frame")
        self._padding_left = padding
        self._overhead = 1
        self._next = _DATA
        return True

    def _read_data(self) -> DataFrame | None:
        """Return what has come of the data and the padding of DATA: section 6.1."""
        start = self._start
        available = len(self._received) - start
        if not available and self._left + self._padding_left:
            return None
        count = min(available, self._left)
        received = self._received
        if count > _MAX_COPY:
            received = memoryview(received)
        data = received[start : start + count]
        if count <= _MAX_COPY:
            data = bytes(data)
        self._left -= count
        padding = 0 if self._left else min(available - count, self._padding_left)
        self._padding_left -= padding
        self._start = start + count + padding
        size = count + padding + self._overhead
        self._overhead = 0
        ends_frame = not (self._left or self._padding_left)
        if ends_frame:
            self._next = _HEADER
        end_stream = ends_frame and self._flags & END_STREAM != 0
        return DataFrame(self._stream_id, data, size, ends_frame, end_stream)

    def _parse(self, payload: bytes) -> Frame | None:
        """Parse a payload; return None if it begins or continues a header block."""
        kind = self._kind
        if kind in (HEADERS, PUSH_PROMISE):
            return self._begin_block(payload)
        if kind == CONTINUATION:
            return self._continue_block(payload)
        if kind == WINDOW_UPDATE:
            return self._parse_window_update(payload)
        if kind == RST_STREAM:
            return RstStreamFrame(self._stream_id, _WORD.unpack(payload)[0])
        if kind == SETTINGS:
            return self._parse_settings(payload)
        if kind == PING:
            return PingFrame(self._flags & ACK != 0, payload)
        if kind == GOAWAY:
            return _parse_goaway(payload)
        if _WORD.unpack_from(payload)[0] & _STREAM_BITS == self._stream_id:
            # RFC 7540, section 5.3.1.
            reason = "a stream that depends on itself"
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, reason, self._stream_id)
        return PriorityFrame(self._stream_id)

    def _begin_block(self, payload: bytes) -> Frame | None:
        """Parse HEADERS or PUSH_PROMISE: sections 6.2 and 6.6."""
        kind, flags = self._kind, self._flags
        start = 1 if flags & PADDED else 0
        begin = start
        if kind == PUSH_PROMISE:
            begin += 4
        elif flags & PRIORITY_FLAG:
            begin += 5
        if len(payload) < begin:
            raise _too_short(kind)
        end = len(payload) - (payload[0] if start else 0)
        if end < begin:
            raise _protocol_error("padding longer than its frame")
        # What the first word means, if there is one: a promised stream or a dependency.
        word = _WORD.unpack_from(payload, start)[0] & _STREAM_BITS if begin > start else 0
        if kind == PUSH_PROMISE:
            if not word:
                raise _protocol_error("PUSH_PROMISE of stream 0")
            self._open = PushPromiseFrame(self._stream_id, word)
        else:
            depends_on_itself = word == self._stream_id  # no stream has the id 0
            self._open = HeadersFrame(self._stream_id, flags & END_STREAM != 0, depends_on_itself)
        return self._continue_block(payload[begin:end])

    def _continue_block(self, fragment: bytes) -> Frame | None:
        """Add a fragment, and return the frame with its block if it was the last: section 4.3."""
        frame = self._open
        assert frame is not None
        self._fragments.append(fragment)
        self._block_size += len(fragment)
        if not self._flags & END_HEADERS:
            return None
        frame.block = b"".join(self._fragments)
        self._open = None
        self._fragments = []
        self._block_size = 0
        return frame

    def _parse_window_update(self, payload: bytes) -> WindowUpdateFrame:
        increment = _WORD.unpack(payload)[0] & _STREAM_BITS
        if not increment:
            # Section 6.9: an error of the stream, or of the connection for stream 0.
            raise Http2Error(
                ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by zero bytes", self._stream_id
            )
        return WindowUpdateFrame(self._stream_id, increment)

    def _parse_settings(self, payload: bytes) -> SettingsFrame:
        """Parse SETTINGS: section 6.5."""
        ack = self._flags & ACK != 0
        if len(payload) % _SETTING.size or (ack and payload):
            kind = "an acknowledgement of SETTINGS" if ack else "SETTINGS"
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"{kind} of {len(payload)} bytes")
        values: list[tuple[int, int]] = list(_SETTING.iter_unpack(payload))
        for identifier, value in values:
            _check_setting(identifier, value)
        return SettingsFrame(ack, values)


def _check_setting(identifier: int, value: int) -> None:
    """Check the value of a setting: section 6.5.2."""
    if identifier == ENABLE_PUSH:
        if value > 1:
            raise _protocol_error(f"ENABLE_PUSH of {value}")
    elif identifier == INITIAL_WINDOW_SIZE:
        if value > MAX_WINDOW_SIZE:
            raise Http2Error(
                ErrorCode.FLOW_CONTROL_ERROR, f"an INITIAL_WINDOW_SIZE of {value} bytes"
            )
    elif identifier == MAX_FRAME_SIZE and not MIN_MAX_FRAME_SIZE <= value <= MAX_MAX_FRAME_SIZE:
        raise _protocol_error(f"a MAX_FRAME_SIZE of {value} bytes")


def _parse_goaway(payload: bytes) -> GoAwayFrame:
    """Parse GOAWAY: section 6.8."""
    if len(payload) < _TWO_WORDS.size:
        raise _too_short(GOAWAY)
    last_stream_id, error_code = _TWO_WORDS.unpack_from(payload)
    return GoAwayFrame(last_stream_id & _STREAM_BITS, error_code, payload[_TWO_WORDS.size :])


def _protocol_error(reason: str) -> Http2Error:
    return Http2Error(ErrorCode.PROTOCOL_ERROR, reason)


def _too_short(kind: int) -> Http2Error:
    """Return the error of a frame without its mandatory parts: section 4.2."""
    return Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"{_NAMES[kind]} that is too short")


def _flood(reason: str) -> Http2Error:
    """Return the error of a peer that exceeds a limit of ours: section 10.5."""
    return Http2Error(ErrorCode.ENHANCE_YOUR_CALM, reason)
