"""What processes share in memory: documents, rings of records, and numbers.

Each process writes its own, and any process reads all. No process locks or waits.

Documents: a slot has two halves: its worker writes the half that is not in use, and
then puts that in use with one word. A reader that was too slow finds that the checksum of what it
has copied is wrong, and reads again. If a worker is killed while it writes, the document before
stays.

Rings: a record is readable once the writer has moved the end behind it. Before the writer
overwrites the oldest records, it moves the start. A reader that was too slow finds that the
checksum of what it has copied is wrong, and goes on at the new start.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from zlib import crc32

MAX_DOCUMENT = 4 * 2**20
"""Bytes of a document. Memory is used only as far as documents are long."""

_WORD = 8
_HEADER = struct.Struct("=II")
"""Before a document or a record: its length and its checksum."""
_CHECKSUM_START = 1
"""Of a record: not 0, so that zeros are no valid record."""
_LARGEST_SHARE = 4
"""The share of a ring, as its inverse, that one record may take."""
_READS = 3
"""A worker publishes seldom: two documents during one read are not to be expected."""


class SharedDocuments:
    """One document for each slot, for all processes that are forked after this is made."""

    def __init__(self, slots: int, max_document: int = MAX_DOCUMENT) -> None:
        self._max_document = max_document
        half = _HEADER.size + max_document
        self._half = half + -half % _WORD
        self._memories = [memoryview(mmap.mmap(-1, _WORD + 2 * self._half)) for _ in range(slots)]
        self._counts = [memory[:_WORD].cast("Q") for memory in self._memories]
        """How many documents were published in each slot: the last bit is the half in use."""

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        return len(self._memories)

    def publish(self, slot: int, document: bytes) -> bool:
        """Replace the document of a slot, which one process at a time does; false if too long."""
        if len(document) > self._max_document:
            return False
        count = self._counts[slot][0] + 1
        at = self._start(count)
        header = _HEADER.pack(len(document), crc32(document))
        end = at + len(header) + len(document)
        self._memories[slot][at:end] = header + document
        self._counts[slot][0] = count
        return True

    def read_all(self) -> list[bytes]:
        """Return the last document of each slot; empty if there is none."""
        return [self.read(slot) for slot in range(self.slots)]

    def read(self, slot: int = 0) -> bytes:
        """Return the last document of a slot; empty if there is none."""
        memory, counts = self._memories[slot], self._counts[slot]
        for _ in range(_READS):
            at = self._start(counts[0])
            length, checksum = _HEADER.unpack_from(memory, at)
            start = at + _HEADER.size
            document = bytes(memory[start : start + min(length, self._max_document)])
            if crc32(document) == checksum:
                return document
        return b""

    def _start(self, count: int) -> int:
        return _WORD + (count & 1) * self._half


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
            oldest, _ = _HEADER.unpack(self._copy(start, _HEADER.size))
            start += _padded(_HEADER.size + oldest)
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


def shared_counters(count: int) -> list[memoryview]:
    """Return numbers in memory that forked processes share, each as a view of one element."""
    words = memoryview(mmap.mmap(-1, _WORD * count)).cast("Q")
    return [words[i : i + 1] for i in range(count)]
