"""Encodes the frames of HTTP/2: RFC 9113, section 6. None is padded."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

from gateway.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    GOAWAY,
    HEADERS,
    MIN_MAX_FRAME_SIZE,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)

_WORD: Final = Struct(">L")
_TWO_WORDS: Final = Struct(">LL")
_SETTING: Final = Struct(">HL")


def encode_frame_header(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """Encode the header of a frame: section 4.1."""
    return FRAME_HEADER.pack(length >> 16, length & 0xFFFF, kind, flags, stream_id)


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
    return encode_frame_header(RST_STREAM, 0, stream_id, 4) + _WORD.pack(error_code)


def encode_settings(values: Iterable[tuple[int, int]]) -> bytes:
    """Encode SETTINGS of identifiers and values: section 6.5."""
    payload = b"".join([_SETTING.pack(identifier, value) for identifier, value in values])
    return encode_frame_header(SETTINGS, 0, 0, len(payload)) + payload


SETTINGS_ACK: Final = encode_frame_header(SETTINGS, ACK, 0, 0)
"""The acknowledgement of SETTINGS: section 6.5.3."""


def encode_ping(data: bytes, ack: bool = False) -> bytes:
    """Encode PING with 8 bytes of data, or its response: section 6.7."""
    return encode_frame_header(PING, ACK if ack else 0, 0, 8) + data


def encode_goaway(last_stream_id: int, error_code: int, debug_data: bytes = b"") -> bytes:
    """Encode GOAWAY: section 6.8."""
    header = encode_frame_header(GOAWAY, 0, 0, 8 + len(debug_data))
    return header + _TWO_WORDS.pack(last_stream_id, error_code) + debug_data


def encode_window_update(stream_id: int, increment: int) -> bytes:
    """Encode WINDOW_UPDATE, of the connection for stream 0: section 6.9."""
    return encode_frame_header(WINDOW_UPDATE, 0, stream_id, 4) + _WORD.pack(increment)
