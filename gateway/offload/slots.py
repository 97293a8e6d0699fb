"""What a worker and its offload process share: slots of memory, and messages about them."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

from gateway.codec.offload_interface import ConversionJob
from gateway.protocol.datatypes import DATATYPES

SLOT_COUNT = 3
"""Jobs that the offload process has at a time: one that it does, and two that wait."""
MAX_JOB_SIZE = 160 * 1024
"""Bytes of a job's data."""
MAX_RESULT_SIZE = 512 * 1024
"""Bytes of a result: 64 KiB of any datatype, or a window of JSON text, give no more."""

MESSAGE = struct.Struct("<BBI")
"""What to do, or what was done; the number of the slot; the bytes in it."""

DONE, NOT_DONE = 1, 0
"""The first field of a reply. In a request it is the code of a job."""

READY = MESSAGE.pack(DONE, 0, 0)
"""The first message of the offload process, which takes a moment to start."""

_SLOT_SIZE = MAX_JOB_SIZE + MAX_RESULT_SIZE
_PENDING = SLOT_COUNT * _SLOT_SIZE
"""Behind the slots, a byte for each: whether its job is still to be done."""
_SIZE = _PENDING + SLOT_COUNT
_DATATYPES = tuple(DATATYPES.values())
_DATATYPE_NUMBERS = {datatype.name: number for number, datatype in enumerate(_DATATYPES)}


def create_memory() -> int:
    """Create a file in memory, or an unlinked one on disk; return its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tensorgate-offload")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _SIZE)
    return descriptor


class SharedSlots:
    """The slots in the memory of a descriptor, which may be closed then.

    Each slot has room for the data of a job, and for its result.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, _SIZE))

    def write_job(self, slot: int, pieces: tuple[bytes | memoryview, ...]) -> int:
        """Write the data of a job, in pieces one behind the other; return its size."""
        start = at = slot * _SLOT_SIZE
        for piece in pieces:
            self._memory[at : at + len(piece)] = piece
            at += len(piece)
        self._memory[_PENDING + slot] = True
        return at - start

    def cancel(self, slot: int) -> None:
        """Cancel a job, unless the offload process has begun with it."""
        self._memory[_PENDING + slot] = False

    def is_pending(self, slot: int) -> bool:
        """Tell whether a job is still to be done."""
        return bool(self._memory[_PENDING + slot])

    def job_data(self, slot: int, size: int) -> memoryview:
        """Return the data of a job, which stays until the next job in the slot."""
        return self._memory[slot * _SLOT_SIZE :][:size]

    def write_result(self, slot: int, result: bytes | memoryview) -> None:
        """Write a result."""
        start = slot * _SLOT_SIZE + MAX_JOB_SIZE
        self._memory[start : start + len(result)] = result

    def copy_result(self, slot: int, size: int) -> bytes:
        """Return a copy of the result."""
        return bytes(self._memory[slot * _SLOT_SIZE + MAX_JOB_SIZE :][:size])


def encode_job(job: ConversionJob) -> int:
    """Return the code of a job: its datatype and direction in one byte."""
    return 2 * _DATATYPE_NUMBERS[job.datatype.name] + job.to_json


def decode_job(code: int) -> ConversionJob:
    """Return the job of a code."""
    return ConversionJob(to_json=bool(code % 2), datatype=_DATATYPES[code // 2])


class MessageReader:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[tuple[int, int, int]]:
        """Return the messages that are complete: code, slot and size."""
        data = self._partial + data
        complete = len(data) - len(data) % MESSAGE.size
        self._partial = data[complete:]
        return list(MESSAGE.iter_unpack(data[:complete]))
