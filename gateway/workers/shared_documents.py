"""Documents and numbers that processes share in memory: each writes its own, any reads all.

No process locks or waits. A slot has two halves: its worker writes the half that is not in use, and
then puts that in use with one word. A reader that was too slow finds that the checksum of what it
has copied is wrong, and reads again. If a worker is killed while it writes, the document before
stays.
"""

from __future__ import annotations

import mmap
import struct
from zlib import crc32

MAX_DOCUMENT = 4 * 2**20
"""Bytes of a document. Memory is used only as far as documents are long."""

_WORD = 8
_HEADER = struct.Struct("=II")
"""Before a document: its length and its checksum."""
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

    def published(self, slot: int = 0) -> int:
        """Return how many documents were published in a slot."""
        return int(self._counts[slot][0])

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


def shared_counters(count: int) -> list[memoryview]:
    """Return numbers in memory that forked processes share, each as a view of one element."""
    words = memoryview(mmap.mmap(-1, _WORD * count)).cast("Q")
    return [words[i : i + 1] for i in range(count)]
