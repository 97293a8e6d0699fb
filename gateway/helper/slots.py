"""What the gateway and its helper say to each other: frames of a mark, a size and data."""

from __future__ import annotations

import struct

from gateway.codec.loans import Work
from gateway.protocol.datatypes import DATATYPES

HEAD = struct.Struct("<BI")
"""Before the data: a mark of one byte, and the size of the data in bytes."""

DONE, NOT_DONE = 1, 0
"""Marks of a reply."""

READY = HEAD.pack(DONE, 0)
"""What the helper says first: it takes a moment to start."""

_DATATYPES = tuple(DATATYPES.values())


def mark_of(work: Work) -> int:
    """Give the mark that stands for a kind of work."""
    return 2 * _DATATYPES.index(work.datatype) + work.to_json


def work_of(mark: int) -> Work:
    """Give the work that a mark stands for."""
    return Work(to_json=bool(mark % 2), datatype=_DATATYPES[mark // 2])


class FrameReader:
    """Cuts frames out of what arrives."""

    def __init__(self) -> None:
        self._received: list[bytes] = []
        self._size = 0
        self._wanted = HEAD.size

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Give the frames that are whole by now: mark and data."""
        self._received.append(data)
        self._size += len(data)
        frames = []
        while self._size >= self._wanted:
            whole = b"".join(self._received)
            mark, size = HEAD.unpack_from(whole)
            self._wanted = HEAD.size + size
            if len(whole) >= self._wanted:
                frames.append((mark, whole[HEAD.size : self._wanted]))
                whole = whole[self._wanted :]
                self._wanted = HEAD.size
            self._received, self._size = [whole], len(whole)
        return frames
