"""What the gateway and its helper share: slots of memory, and tickets that tell what is in them."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

from gateway.codec.offload import ConversionJob
from gateway.protocol.datatypes import DATATYPES

SLOT_COUNT = 3
"""Slots: pieces of work that the helper has at a time, one to do and two to come."""
MAX_WORK_SIZE = 160 * 1024
"""Bytes of a piece of work at most."""
MAX_RESULT_SIZE = 512 * 1024
"""Bytes of a result at most: no more come of 64 KiB of any datatype, or of a window of text."""

MESSAGE = struct.Struct("<BBI")
"""What is said of a slot: what is to be done with it, or was; its number; the bytes in it."""

DONE, NOT_DONE = 1, 0
"""What a reply says in the first place; else it is the mark of a kind of work."""

READY = MESSAGE.pack(DONE, 0, 0)
"""What the helper says first: it takes a moment to start."""

_SLOT = MAX_WORK_SIZE + MAX_RESULT_SIZE
_WANTED = SLOT_COUNT * _SLOT
"""Where it stands, in a byte for each slot, whether its work is still to be done."""
_SIZE = _WANTED + SLOT_COUNT
_DATATYPES = tuple(DATATYPES.values())
_NUMBERS = {datatype.name: number for number, datatype in enumerate(_DATATYPES)}


def create_memory() -> int:
    """Open a file of nothing but memory, or a passing one on disk; give its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tensorgate-helper")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _SIZE)
    return descriptor


class SharedSlots:
    """The memory behind a descriptor, which may be closed then: each slot has work and result."""

    def __init__(self, descriptor: int) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, _SIZE))

    def put_work(self, slot: int, pieces: tuple[bytes | memoryview, ...]) -> int:
        """Write the pieces, one behind the other; give their size."""
        start = at = slot * _SLOT
        for piece in pieces:
            self._memory[at : at + len(piece)] = piece
            at += len(piece)
        self._memory[_WANTED + slot] = True
        return at - start

    def cancel(self, slot: int) -> None:
        """Note that the work need not be done any more; whoever is at it may go on."""
        self._memory[_WANTED + slot] = False

    def is_pending(self, slot: int) -> bool:
        """Tell whether the work is still to be done."""
        return bool(self._memory[_WANTED + slot])

    def work(self, slot: int, size: int) -> memoryview:
        """Give the work, which lies there until there is other work in the slot."""
        return self._memory[slot * _SLOT :][:size]

    def put_result(self, slot: int, result: bytes | memoryview) -> None:
        """Write a result."""
        start = slot * _SLOT + MAX_WORK_SIZE
        self._memory[start : start + len(result)] = result

    def result(self, slot: int, size: int) -> bytes:
        """Copy the result out."""
        return bytes(self._memory[slot * _SLOT + MAX_WORK_SIZE :][:size])


def work_code(work: ConversionJob) -> int:
    """Give the mark that stands for a kind of work."""
    return 2 * _NUMBERS[work.datatype.name] + work.to_json


def work_from_code(mark: int) -> ConversionJob:
    """Give the work that a mark stands for."""
    return ConversionJob(to_json=bool(mark % 2), datatype=_DATATYPES[mark // 2])


class MessageReader:
    """Cuts tickets out of what arrives."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[tuple[int, int, int]]:
        """Give the tickets that are whole by now: mark, slot and size."""
        data = self._partial + data
        whole = len(data) - len(data) % MESSAGE.size
        self._partial = data[whole:]
        return list(MESSAGE.iter_unpack(data[:whole]))
