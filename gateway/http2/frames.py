"""The frames of HTTP/2: RFC 9113, sections 4 and 6."""

from __future__ import annotations

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

FRAME_HEADER: Final = Struct(">BHBBL")
"""The length in two parts, type, flags, and stream id with the reserved bit: section 4.1."""
FRAME_HEADER_SIZE: Final = 9


class Frame:
    """A received frame; ``stream_id`` is 0 for those of the connection."""

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


class HeaderBlockFrame(Frame):
    """A frame with the complete block of it and its CONTINUATION frames.

    The block must be decoded even if the frame is refused: section 4.3.
    """

    def __init__(self, stream_id: int) -> None:
        super().__init__(stream_id)
        self.block = b""


class HeadersFrame(HeaderBlockFrame):
    """HEADERS; priorities are ignored.

    ``depends_on_itself`` is a stream error of type PROTOCOL_ERROR: RFC 7540, section 5.3.1.
    """

    def __init__(self, stream_id: int, end_stream: bool, depends_on_itself: bool) -> None:
        super().__init__(stream_id)
        self.end_stream: Final = end_stream
        self.depends_on_itself: Final = depends_on_itself


class PushPromiseFrame(HeaderBlockFrame):
    """PUSH_PROMISE: an error of the peer, as the gateway never allows it."""

    def __init__(self, stream_id: int, promised_stream_id: int) -> None:
        super().__init__(stream_id)
        self.promised_stream_id: Final = promised_stream_id


class PriorityFrame(Frame):
    """PRIORITY, which has no effect: section 5.3.2."""


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


class UnknownFrame(Frame):
    """The start of a frame of an unknown type; to be ignored: sections 4.1 and 5.5.

    ``size`` is that of the payload, which is dropped as it arrives.
    """

    def __init__(self, stream_id: int, kind: int, size: int) -> None:
        super().__init__(stream_id)
        self.kind: Final = kind
        self.size: Final = size
