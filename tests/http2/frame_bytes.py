"""Frames of HTTP/2 as bytes, also invalid ones, and what a reader makes of them."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.http2.errors import Http2Error
from gateway.http2.frame_reader import MAX_HEADER_BLOCK, FrameReader
from gateway.http2.frames import FRAME_HEADER_SIZE, PRIORITY, DataFrame, Frame

Told = tuple[object, ...]
"""A frame or an error in plain words, which can be compared."""


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return the bytes of any frame."""
    return (
        len(payload).to_bytes(3, "big")
        + bytes([kind, flags])
        + stream_id.to_bytes(4, "big")
        + payload
    )


def priority(stream_id: int, depends_on: int) -> bytes:
    """Return PRIORITY with the least weight: section 6.3."""
    return frame(PRIORITY, 0, stream_id, depends_on.to_bytes(4, "big") + b"\0")


def read(pieces: Iterable[bytes | memoryview], max_frame_size: int = 2**14) -> list[Told]:
    """Return all frames and errors; the pieces of each DATA frame are joined."""
    reader = FrameReader(max_frame_size)
    found: list[Told] = []
    data: list[DataFrame] = []
    for piece in pieces:
        reader.feed(piece)
        while True:
            try:
                each = reader.next_frame()
            except Http2Error as error:
                found.append(("error", error.code.name, error.reason, error.stream_id))
                if error.ends_connection:
                    return found
                continue
            if each is None:
                assert reader.size < MAX_HEADER_BLOCK + FRAME_HEADER_SIZE
                break
            if isinstance(each, DataFrame):
                data.append(each)
                if each.ends_frame:
                    found.append(_joined(data))
                    data = []
            else:
                found.append(tell(each))
    if data:
        # How many pieces there are depends on the cut, but not what came of the frame.
        found.append(("partial", *_joined(data)))
    return found


def _joined(pieces: list[DataFrame]) -> Told:
    assert not any(each.end_stream or each.ends_frame for each in pieces[:-1])
    data = b"".join([each.data for each in pieces])
    size = sum(each.size for each in pieces)
    last = pieces[-1]
    return "DATA", last.stream_id, data, size, last.end_stream


def tell(each: Frame) -> Told:
    """Return the name of a frame, and what it says."""
    names = ["stream_id", *_ATTRIBUTES.get(type(each).__name__, ())]
    return type(each).__name__, *[getattr(each, name) for name in names]


_ATTRIBUTES = {
    "HeadersFrame": ("block", "end_stream", "depends_on_itself"),
    "RstStreamFrame": ("error_code",),
    "SettingsFrame": ("ack", "values"),
    "PingFrame": ("ack", "data"),
    "GoAwayFrame": ("last_stream_id", "error_code", "debug_data"),
    "WindowUpdateFrame": ("increment",),
}
