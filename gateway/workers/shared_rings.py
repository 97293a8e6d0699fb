"""Rings of records that processes share in memory: each writes its own, and any process reads all.

No process locks or waits. A record is readable once the writer has moved the end behind it. Before
the writer overwrites the oldest records, it moves the start. A reader that was too slow finds that
the checksum of what it has copied is wrong, and goes on at the new start.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from zlib import crc32

_WORD = 8
_HEADER = struct.Struct("=II")
"""Before a record: its length and its checksum."""
_CHECKSUM_START = 1
"""Not 0, so that zeros are no valid record."""
_LARGEST_SHARE = 4
"""The share of a ring, as its inverse, that one record may take."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that were read, oldest first, and the position behind the last one."""

    records: list[bytes]
    position: int


class SharedRing:
    """The last records of one writer, in ``size`` bytes; positions count the bytes ever written.

    It is for all processes that are forked after it is made.
    """

    def __init__(self, size: int) -> None:
        self._size = size - size % _WORD
        memory = memoryview(mmap.mmap(-1, 2 * _WORD + self._size))
        self._start_and_end = memory[: 2 * _WORD].cast("Q")
        self._ring = memory[2 * _WORD :]

    def append(self, record: bytes) -> bool:
        """Append a record, which one process at a time does; false if it is too long."""
        length = _padded(_HEADER.size + len(record))
        if length > self._size // _LARGEST_SHARE:
            return False
        start, end = self._start_and_end
        while end + length - start > self._size:
            start += self._length_at(start)
        self._start_and_end[0] = start
        header = _HEADER.pack(len(record), crc32(record, _CHECKSUM_START))
        self._write(end, header + record)
        self._start_and_end[1] = end + length
        return True

    def read(self, position: int = 0) -> Batch:
        """Return the records from a position on, or all if they are not there any more."""
        start, end = self._start_and_end
        at = max(position, start)
        records = []
        while at < end:
            length, checksum = _HEADER.unpack(self._copy(at, _HEADER.size))
            record = self._copy(at + _HEADER.size, length) if length < self._size else b""
            start = self._start_and_end[0]
            if at < start:
                at = start
            elif crc32(record, _CHECKSUM_START) == checksum:
                records.append(record)
                at += _padded(_HEADER.size + length)
            else:
                break  # on its way from another processor: the next read starts there
        return Batch(records, min(at, end))

    def _length_at(self, position: int) -> int:
        length, _ = _HEADER.unpack(self._copy(position, _HEADER.size))
        return _padded(_HEADER.size + int(length))

    def _write(self, position: int, data: bytes) -> None:
        at = position % self._size
        first = min(len(data), self._size - at)
        self._ring[at : at + first] = data[:first]
        self._ring[: len(data) - first] = data[first:]

    def _copy(self, position: int, length: int) -> bytes:
        at = position % self._size
        first = min(length, self._size - at)
        return bytes(self._ring[at : at + first]) + bytes(self._ring[: length - first])


def _padded(length: int) -> int:
    return length + -length % _WORD
