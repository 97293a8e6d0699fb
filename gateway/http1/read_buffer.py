"""Where what arrives is put: one piece of memory for all connections of a process."""

from __future__ import annotations

import weakref

import numpy as np

_SLAB = 1000 * 1024
"""Bytes of memory taken at a time, less than what the C library would map anew each time."""
LEAST_SPACE = 640 * 1024
"""Bytes offered to a read at least: what 256 KiB and a begun record of TLS hold fits in, and so do
the tensors of an image, which two reads would bring instead of one."""
_COPIED = 16 * 1024
"""Bytes that are copied, so that little data does not keep much memory."""

_MOST_SLABS = 32
"""Slabs that may be kept in part by what waits: more than bodies that pass through need."""
_COPIED_BEYOND = 256 * 1024
"""Bytes that are copied where there are more of them."""


class ReadBuffer:
    """Offers memory to read into, and gives what was read as a view of it, or a copy if small.

    Who keeps a view keeps all of its slab. What is small counts by how many of them are kept.
    """

    def __init__(self) -> None:
        self._slab = memoryview(b"")
        self._slabs = 0

    def space(self) -> memoryview:
        """Give the memory for the next read."""
        if len(self._slab) < LEAST_SPACE:
            # Unlike a bytearray, this is not cleared first.
            slab = np.empty(_SLAB, np.uint8)
            self._slabs += 1
            weakref.finalize(slab, self._freed).atexit = False
            self._slab = slab.data
        return self._slab

    def filled(self, size: int) -> bytes | memoryview:
        """Give the first ``size`` bytes of it, which were read."""
        if size <= (_COPIED if self._slabs <= _MOST_SLABS else _COPIED_BEYOND):
            return bytes(self._slab[:size])
        data = self._slab[:size]
        self._slab = self._slab[size:]
        return data

    def _freed(self) -> None:
        """Note that nobody keeps a slab any more."""
        self._slabs -= 1


READ_BUFFER = ReadBuffer()
"""A read follows at once where space was given, so that one is enough for a process."""
