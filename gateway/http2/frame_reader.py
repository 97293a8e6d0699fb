"""Reads the frames of HTTP/2 from received bytes: RFC 9113, sections 4 and 6.

It checks what needs no state of streams. What it buffers is bounded, whatever the peer announces.
"""

from __future__ import annotations

from typing import Final

from gateway.http2 import frames
from gateway.http2.errors import ErrorCode, Http2Error, flood_error, protocol_error

MAX_HEADER_BLOCK: Final = 128 * 1024
"""Maximum bytes of a header block: twice those of a header list, so that a list that is a little
too large is refused without closing the connection."""

MAX_CONTINUATIONS: Final = 8
"""Maximum CONTINUATION frames of a header block: as many as hold the maximum block."""

MAX_CONTROL_PAYLOAD: Final = 16 * 1024
"""Maximum bytes of SETTINGS or GOAWAY, however large frames may be."""

_MAX_COPY: Final = 16 * 1024
"""Data of a small read are copied if they have at most so many bytes."""
_MAX_COPY_OF_VIEW: Final = 1024
"""The same for a large read, of which a view costs less. Whoever keeps a small view for longer than
the frames of a read are processed has to copy it: it pins the whole buffer."""

_NAMES: Final = (
    *("DATA", "HEADERS", "PRIORITY", "RST_STREAM", "SETTINGS", "PUSH_PROMISE", "PING", "GOAWAY"),
    *("WINDOW_UPDATE", "CONTINUATION"),
)
_OF_CONNECTION: Final = 1 << frames.SETTINGS | 1 << frames.PING | 1 << frames.GOAWAY
"""A bit for each type."""
_FIXED_LENGTHS: Final = {
    frames.PRIORITY: 5,
    frames.RST_STREAM: 4,
    frames.PING: 8,
    frames.WINDOW_UPDATE: 4,
}

# What comes next.
_HEADER: Final = 0
_PAYLOAD: Final = 1  # buffered until it is complete
_PAD_LENGTH: Final = 2  # of DATA
_DATA: Final = 3
_SKIPPED: Final = 4

_STREAM_BITS: Final = 0x7FFFFFFF
"""All but the reserved bit, which is ignored: section 4.1."""


class FrameReader:
    """Reads frames; ``max_frame_size`` is the announced SETTINGS_MAX_FRAME_SIZE.

    Feed it what was received, then take frames until there is none. After a connection error it
    must not be used; after a stream error the next frame can be read.
    """

    def __init__(self, max_frame_size: int = frames.MIN_MAX_FRAME_SIZE) -> None:
        self.max_frame_size = max_frame_size
        self._received: bytes | memoryview = b""
        self._start = self._end = 0
        self._max_copy = _MAX_COPY
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
        self._open: frames.HeadersFrame | None = None
        self._fragments: list[bytes] = []
        self._block_size = 0

    @property
    def size(self) -> int:
        """The buffered bytes of incomplete frames and header blocks."""
        return len(self._partial) + self._block_size

    @property
    def unread(self) -> int:
        """The bytes that were fed and not read yet; 0 once ``next_frame`` has returned None."""
        return self._end - self._start

    def drop(self) -> None:
        """Drop all that was fed, and not made into a frame yet."""
        self._forget_received()
        self._partial = bytearray()
        self._fragments = []
        self._block_size = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Add received data."""
        if self._start < self._end:
            data = b"".join([self._received[self._start :], data])
        self._received = data
        self._start, self._end = 0, len(data)
        self._max_copy = _MAX_COPY if isinstance(data, bytes) else _MAX_COPY_OF_VIEW

    def _forget_received(self) -> None:
        self._received = b""  # a view would pin its slab
        self._start = self._end = 0

    def next_frame(self) -> frames.Frame | None:
        """Return the next frame, None if it is not complete.

        DATA frames come in pieces, as their data arrive. Raises Http2Error.
        """
        frame = self._read_frame()
        if frame is None:
            self._forget_received()
        return frame

    def _read_frame(self) -> frames.Frame | None:
        while True:
            if self._next == _HEADER:
                if not self._read_header():
                    return None
                if self._next == _SKIPPED:
                    return frames.Frame(self._stream_id)  # of an unknown type
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
            elif not (self._skip() if self._next == _SKIPPED else self._read_pad_length()):
                return None

    def _take(self, size: int) -> bytes | None:
        """Return the next bytes, None while they are not complete."""
        partial = self._partial
        end = self._start + size - len(partial)
        if end > self._end:
            partial += self._received[self._start :]
            self._start = self._end
            return None
        taken = self._copy(end)
        if partial:
            taken = bytes(partial) + taken
            self._partial = bytearray()
        return taken

    def _copy(self, end: int) -> bytes:
        """Return what was received up to ``end``, and go on from there."""
        received, start = self._received, self._start
        self._start = end
        # A slice of what is known to be bytes is made without a call of the interpreter.
        return received[start:end] if isinstance(received, bytes) else bytes(received[start:end])

    def _skip(self) -> bool:
        """Drop the rest of a frame as it arrives; return whether that was all."""
        count = min(self._left, self._end - self._start)
        self._start += count
        self._left -= count
        if self._left:
            return False
        self._next = _HEADER
        return True

    def _read_header(self) -> bool:
        """Read and check the header of a frame; return whether it was complete."""
        received, at = self._received, self._start
        if at == self._end:
            return False
        end = at + frames.FRAME_HEADER_SIZE
        if isinstance(received, bytes) and end <= self._end and not self._partial:
            header = received  # without a copy
            self._start = end
        elif (taken := self._take(frames.FRAME_HEADER_SIZE)) is not None:
            header, at = taken, 0
        else:
            return False
        length = header[at] << 16 | header[at + 1] << 8 | header[at + 2]
        kind, flags = header[at + 3], header[at + 4]
        stream_id = _word(header, at + 5) & _STREAM_BITS
        self._left = length
        self._kind = kind
        self._flags = flags
        self._stream_id = stream_id
        if length > self.max_frame_size:
            # Section 4.2. For DATA a stream error would do, but then it had to be skipped.
            raise _frame_size_error(
                f"a frame of {length} bytes, where {self.max_frame_size} are allowed"
            )
        self._check_order(kind, stream_id)
        if kind == frames.DATA:
            self._overhead = self._padding_left = 0
            self._next = _PAD_LENGTH if flags & frames.PADDED else _DATA
            if flags & frames.PADDED and not length:
                raise _too_short(kind)
        elif kind > frames.CONTINUATION:
            self._next = _SKIPPED
        else:
            self._next = _PAYLOAD
            self._check_length(kind, length)
        return True

    def _check_order(self, kind: int, stream_id: int) -> None:
        """Check that a frame may come here, and its stream id."""
        if self._open is not None:
            # Sections 4.3, 5.5 and 6.10: also no unknown frame, and no other stream.
            if kind != frames.CONTINUATION or stream_id != self._open.stream_id:
                raise protocol_error("another frame within a header block")
        elif kind == frames.CONTINUATION:
            raise protocol_error("CONTINUATION without a header block")  # section 6.10
        if kind == frames.PUSH_PROMISE:
            raise protocol_error("PUSH_PROMISE, which was not allowed")  # section 6.6
        # Sections 6.1 to 6.10: WINDOW_UPDATE may come on both, and so may unknown frames.
        if _OF_CONNECTION >> kind & 1:
            if stream_id:
                raise protocol_error(f"{_NAMES[kind]} on a stream")
        elif not stream_id and kind <= frames.CONTINUATION and kind != frames.WINDOW_UPDATE:
            raise protocol_error(f"{_NAMES[kind]} on stream 0")

    def _check_length(self, kind: int, length: int) -> None:
        """Check the length of a frame that will be buffered."""
        expected = _FIXED_LENGTHS.get(kind)
        if expected is not None:
            if length != expected:
                if kind == frames.PRIORITY:
                    self._next = _SKIPPED
                # Sections 6.3, 6.4, 6.7 and 6.9: for PRIORITY, only the stream is in error.
                raise _frame_size_error(
                    f"{_NAMES[kind]} of {length} bytes",
                    self._stream_id if kind == frames.PRIORITY else 0,
                )
        elif _OF_CONNECTION >> kind & 1:
            if length > MAX_CONTROL_PAYLOAD:
                raise flood_error(f"{_NAMES[kind]} of more than {MAX_CONTROL_PAYLOAD} bytes")
        elif self._block_size + length > MAX_HEADER_BLOCK:
            raise flood_error(f"a header block of more than {MAX_HEADER_BLOCK} bytes")
        elif len(self._fragments) > MAX_CONTINUATIONS:
            raise flood_error(f"more than {MAX_CONTINUATIONS} CONTINUATION frames")

    def _read_pad_length(self) -> bool:
        """Read the length of the padding of DATA: section 6.1."""
        if self._start == self._end:
            return False
        padding: int = self._received[self._start]
        self._start += 1
        self._left -= 1 + padding
        if self._left < 0:
            raise protocol_error("padding of the length of its frame")
        self._padding_left = padding
        self._overhead = 1
        self._next = _DATA
        return True

    def _read_data(self) -> frames.DataFrame | None:
        """Return what has come of the data and the padding of DATA: section 6.1."""
        start = self._start
        available = self._end - start
        if not available and self._left + self._padding_left:
            return None
        count = min(available, self._left)
        data: bytes | memoryview
        if count > self._max_copy:
            data = memoryview(self._received)[start : start + count]
        else:
            data = self._copy(start + count)
        self._left -= count
        padding = 0 if self._left else min(available - count, self._padding_left)
        self._padding_left -= padding
        self._start = start + count + padding
        size = count + padding + self._overhead
        self._overhead = 0
        ends_frame = not (self._left or self._padding_left)
        if ends_frame:
            self._next = _HEADER
        end_stream = ends_frame and self._flags & frames.END_STREAM != 0
        return frames.DataFrame(self._stream_id, data, size, ends_frame, end_stream)

    def _parse(self, payload: bytes) -> frames.Frame | None:
        """Parse a payload; return None if it begins or continues a header block."""
        kind = self._kind
        if kind == frames.HEADERS:
            return self._begin_block(payload)
        if kind == frames.CONTINUATION:
            return self._continue_block(payload)
        if kind == frames.WINDOW_UPDATE:
            return self._parse_window_update(payload)
        if kind == frames.RST_STREAM:
            return frames.RstStreamFrame(self._stream_id, _word(payload, 0))
        if kind == frames.SETTINGS:
            return self._parse_settings(payload)
        if kind == frames.PING:
            return frames.PingFrame(self._flags & frames.ACK != 0, payload)
        if kind == frames.GOAWAY:
            if len(payload) < 2 * frames.WORD_SIZE:
                raise _too_short(kind)  # section 6.8
            last, code = _word(payload, 0) & _STREAM_BITS, _word(payload, 4)
            return frames.GoAwayFrame(last, code, payload[2 * frames.WORD_SIZE :])
        if _word(payload, 0) & _STREAM_BITS == self._stream_id:
            # RFC 7540, section 5.3.1.
            raise protocol_error("a stream that depends on itself", self._stream_id)
        return frames.Frame(self._stream_id)

    def _begin_block(self, payload: bytes) -> frames.Frame | None:
        """Parse HEADERS: section 6.2."""
        flags = self._flags
        start = 1 if flags & frames.PADDED else 0
        begin = start + (5 if flags & frames.PRIORITY_FLAG else 0)
        if len(payload) < begin:
            raise _too_short(frames.HEADERS)
        end = len(payload) - (payload[0] if start else 0)
        if end < begin:
            raise protocol_error("padding longer than its frame")
        depends_on = _word(payload, start) & _STREAM_BITS if begin > start else 0
        self._open = frames.HeadersFrame(
            self._stream_id,
            flags & frames.END_STREAM != 0,
            depends_on == self._stream_id,  # no stream has the id 0
        )
        return self._continue_block(payload[begin:end])

    def _continue_block(self, fragment: bytes) -> frames.Frame | None:
        """Add a fragment, and return the frame with its block if it was the last: section 4.3."""
        frame = self._open
        assert frame is not None
        self._fragments.append(fragment)
        self._block_size += len(fragment)
        if not self._flags & frames.END_HEADERS:
            return None
        frame.block = b"".join(self._fragments)
        self._open = None
        self._fragments = []
        self._block_size = 0
        return frame

    def _parse_window_update(self, payload: bytes) -> frames.WindowUpdateFrame:
        increment = _word(payload, 0) & _STREAM_BITS
        if not increment:
            # Section 6.9: an error of the stream, or of the connection for stream 0.
            raise protocol_error("WINDOW_UPDATE by zero bytes", self._stream_id)
        return frames.WindowUpdateFrame(self._stream_id, increment)

    def _parse_settings(self, payload: bytes) -> frames.SettingsFrame:
        """Parse SETTINGS: section 6.5."""
        ack = self._flags & frames.ACK != 0
        if len(payload) % frames.SETTING.size or (ack and payload):
            kind = "an acknowledgement of SETTINGS" if ack else "SETTINGS"
            raise _frame_size_error(f"{kind} of {len(payload)} bytes")
        values: list[tuple[int, int]] = list(frames.SETTING.iter_unpack(payload))
        for identifier, value in values:
            _check_setting(identifier, value)
        return frames.SettingsFrame(ack, values)


def _word(data: bytes, start: int) -> int:
    """Return the number of 4 bytes that begins there."""
    high = data[start] << 8 | data[start + 1]
    return high << 16 | data[start + 2] << 8 | data[start + 3]


def _check_setting(identifier: int, value: int) -> None:
    """Check the value of a setting: section 6.5.2."""
    if identifier == frames.INITIAL_WINDOW_SIZE and value > frames.MAX_WINDOW_SIZE:
        reason = f"an INITIAL_WINDOW_SIZE of {value} bytes"
        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, reason)
    if identifier == frames.ENABLE_PUSH and value > 1:
        raise protocol_error(f"ENABLE_PUSH of {value}")
    is_size = frames.MIN_MAX_FRAME_SIZE <= value <= frames.MAX_MAX_FRAME_SIZE
    if identifier == frames.MAX_FRAME_SIZE and not is_size:
        raise protocol_error(f"a MAX_FRAME_SIZE of {value} bytes")


def _frame_size_error(reason: str, stream_id: int = 0) -> Http2Error:
    return Http2Error(ErrorCode.FRAME_SIZE_ERROR, reason, stream_id)


def _too_short(kind: int) -> Http2Error:
    """Return the error of a frame without its mandatory parts: section 4.2."""
    return _frame_size_error(f"{_NAMES[kind]} that is too short")
