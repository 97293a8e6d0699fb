"""The frames of HTTP/2: those received, and how those to send are written. RFC 9113, section 6.

None that is sent is padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends first, before its SETTINGS: section 3.4."""

# The types of frames.
DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

# The flags of frames.
ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY_FLAG: Final = 0x20

# The identifiers of settings: section 6.5.2.
HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

MIN_MAX_FRAME_SIZE: Final = 2**14
"""The smallest and initial value of MAX_FRAME_SIZE: section 6.5.2."""
MAX_MAX_FRAME_SIZE: Final = 2**24 - 1
"""The largest value of MAX_FRAME_SIZE: section 6.5.2."""
MAX_WINDOW_SIZE: Final = 2**31 - 1
"""The largest flow-control window, and the largest stream id: sections 5.1.1 and 6.9.1."""

FRAME_HEADER_SIZE: Final = 9
"""The length in 3 bytes, type, flags, and stream id with the reserved bit: section 4.1."""

# What payloads consist of.
WORD_SIZE: Final = 4
SETTING: Final = Struct(">HL")


class Frame:
    """A received frame; ``stream_id`` is 0 for those of the connection.

    One without a class of its own has no effect: PRIORITY (section 5.3.2), and the start of one of
    an unknown type (sections 4.1 and 5.5), whose payload is dropped as it arrives.
    """

    def __init__(self, stream_id: int) -> None:
        self.stream_id: Final = stream_id


class DataFrame(Frame):
    """A piece of a DATA frame: its data come as they arrive, and are not buffered.

    ``size`` is what the piece counts in flow control: with its padding, which is dropped.
    ``ends_frame`` marks the last piece of a frame; only that one can have ``end_stream``.
    """

    def __init__(
        self,
        stream_id: int,
        data: bytes | memoryview,
        size: int,
        ends_frame: bool,
        end_stream: bool,
    ) -> None:
        super().__init__(stream_id)
        self.data: Final = data
        self.size: Final = size
        self.ends_frame: Final = ends_frame
        self.end_stream: Final = end_stream


class HeadersFrame(Frame):
    """HEADERS with the complete block of it and its CONTINUATION frames; priorities are ignored.

    The block must be decoded even if the frame is refused: section 4.3. ``depends_on_itself`` is a
    stream error of type PROTOCOL_ERROR: RFC 7540, section 5.3.1.
    """

    def __init__(self, stream_id: int, end_stream: bool, depends_on_itself: bool) -> None:
        super().__init__(stream_id)
        self.block = b""
        self.end_stream: Final = end_stream
        self.depends_on_itself: Final = depends_on_itself


class RstStreamFrame(Frame):
    """RST_STREAM; the code may be unknown."""

    def __init__(self, stream_id: int, error_code: int) -> None:
        super().__init__(stream_id)
        self.error_code: Final = error_code


class SettingsFrame(Frame):
    """SETTINGS, or its acknowledgement.

    ``values`` are identifiers and values, in the order in which they apply. Unknown ones are to be
    ignored: section 6.5.2.
    """

    def __init__(self, ack: bool, values: list[tuple[int, int]]) -> None:
        super().__init__(0)
        self.ack: Final = ack
        self.values: Final = values


class PingFrame(Frame):
    """PING, or its response; ``data`` has 8 bytes."""

    def __init__(self, ack: bool, data: bytes) -> None:
        super().__init__(0)
        self.ack: Final = ack
        self.data: Final = data


class GoAwayFrame(Frame):
    """GOAWAY; the code may be unknown."""

    def __init__(self, last_stream_id: int, error_code: int, debug_data: bytes) -> None:
        super().__init__(0)
        self.last_stream_id: Final = last_stream_id
        self.error_code: Final = error_code
        self.debug_data: Final = debug_data


class WindowUpdateFrame(Frame):
    """WINDOW_UPDATE of a stream or of the connection."""

    def __init__(self, stream_id: int, increment: int) -> None:
        super().__init__(stream_id)
        self.increment: Final = increment


def _word(value: int) -> bytes:
    return value.to_bytes(WORD_SIZE, "big")


def encode_frame_header(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """Encode the header of a frame: section 4.1."""
    # Compiled, one small number for all frames of less than 16 KiB.
    return (length << 48 | kind << 40 | flags << 32 | stream_id).to_bytes(FRAME_HEADER_SIZE, "big")


def encode_data_header(stream_id: int, length: int, end_stream: bool) -> bytes:
    """Encode the header of DATA; its data are sent after it, so that they are not copied."""
    return encode_frame_header(DATA, END_STREAM if end_stream else 0, stream_id, length)


def encode_headers(
    stream_id: int, block: bytes, end_stream: bool, max_frame_size: int = MIN_MAX_FRAME_SIZE
) -> bytes:
    """Encode HEADERS, and CONTINUATION frames where one frame cannot have the whole block.

    No other frame may be sent between them: section 4.3.
    """
    kind, flags, size = HEADERS, END_STREAM if end_stream else 0, len(block)
    if size <= max_frame_size:
        return encode_frame_header(kind, flags | END_HEADERS, stream_id, size) + block
    parts: list[bytes] = []
    for start in range(0, size, max_frame_size):
        part = block[start : start + max_frame_size]
        if start + max_frame_size >= size:
            flags |= END_HEADERS
        parts.append(encode_frame_header(kind, flags, stream_id, len(part)))
        parts.append(part)
        kind, flags = CONTINUATION, 0
    return b"".join(parts)


def encode_rst_stream(stream_id: int, error_code: int) -> bytes:
    """Encode RST_STREAM: section 6.4."""
    return encode_frame_header(RST_STREAM, 0, stream_id, 4) + _word(error_code)


def encode_settings(values: Iterable[tuple[int, int]]) -> bytes:
    """Encode SETTINGS of identifiers and values: section 6.5."""
    payload = b"".join([SETTING.pack(identifier, value) for identifier, value in values])
    return encode_frame_header(SETTINGS, 0, 0, len(payload)) + payload


SETTINGS_ACK: Final = encode_frame_header(SETTINGS, ACK, 0, 0)
"""The acknowledgement of SETTINGS: section 6.5.3."""


def encode_ping(data: bytes, ack: bool = False) -> bytes:
    """Encode PING with 8 bytes of data, or its response: section 6.7."""
    return encode_frame_header(PING, ACK if ack else 0, 0, 8) + data


def encode_goaway(last_stream_id: int, error_code: int, debug_data: bytes = b"") -> bytes:
    """Encode GOAWAY: section 6.8."""
    header = encode_frame_header(GOAWAY, 0, 0, 8 + len(debug_data))
    return header + _word(last_stream_id) + _word(error_code) + debug_data


def encode_window_update(stream_id: int, increment: int) -> bytes:
    """Encode WINDOW_UPDATE, of the connection for stream 0: section 6.9."""
    return encode_frame_header(WINDOW_UPDATE, 0, stream_id, 4) + _word(increment)
