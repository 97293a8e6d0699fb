"""The buffer that sockets are read into: one for all connections of a process."""

from __future__ import annotations

import weakref
from typing import Final

import numpy as np

from gateway.system.buffers import MAX_WINDOW

SLAB_SIZE = 1000 * 1024
"""Bytes of a slab: less than what the C library would map anew for each allocation."""
MIN_SPACE = MAX_WINDOW
"""Minimum bytes for a read. It fits 256 KiB and a partial TLS record, and the tensors of an image,
which else would take two reads."""
_MAX_COPY: Final = 16 * 1024
"""A read of at most so many bytes is copied, so that it does not pin a slab."""

_MAX_PINNED_SLABS: Final = 32
"""Slabs that waiting data may pin; bodies in transit need fewer."""
_MAX_COPY_WHEN_PINNED: Final = 256 * 1024
"""A read of at most so many bytes is copied while more slabs are pinned."""


class ReadBuffer:
    """Provides memory to read into, in slabs that are shared between reads.

    A memoryview of a large read pins its whole slab. Small reads are copied instead.
    """

    def __init__(self) -> None:
        self._slab = memoryview(b"")
        self._slabs = 0

    def prepare(self) -> memoryview:
        """Return the memory for the next read."""
        if len(self._slab) < MIN_SPACE:
            # Unlike a bytearray, numpy's memory is not zeroed first.
            slab = np.empty(SLAB_SIZE, np.uint8)
            self._slabs += 1
            weakref.finalize(slab, self._count_freed_slab).atexit = False
            self._slab = slab.data
        return self._slab

    def commit(self, size: int) -> bytes | memoryview:
        """Return the first ``size`` bytes of the memory, which were read."""
        if size <= (_MAX_COPY if self._slabs <= _MAX_PINNED_SLABS else _MAX_COPY_WHEN_PINNED):
            return self._slab[:size].tobytes()
        data = self._slab[:size]
        self._slab = self._slab[size:]
        return data

    def _count_freed_slab(self) -> None:
        self._slabs -= 1


READ_BUFFER = ReadBuffer()
"""One is enough for a process: each read directly follows its ``prepare``."""
