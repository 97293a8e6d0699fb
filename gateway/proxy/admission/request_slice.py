"""Shared memory that a call has for the body of its request, which is received into it."""

from __future__ import annotations

from typing import Final

from gateway.proxy.admission.memory_budget import Reservation
from gateway.system.shared_memory import Slice
from gateway.upstream.transport import SharedMemory

_ALIGNMENT: Final = 64
"""Bytes of a cache line, and of the widest vectors."""


class RequestSlice:
    """A slice that the body of a request is received into: ``view``, empty once it is released.

    The bytes that have come are reserved until then. The tensors, from byte ``start``, are aligned
    in memory.
    """

    def __init__(
        self, lane: SharedMemory, taken: Slice, size: int, start: int, reservation: Reservation
    ) -> None:
        self.lane: Final = lane
        self.taken: Final = taken
        self.first: Final = -start % _ALIGNMENT
        """Where the body begins in the slice."""
        self.view = taken.view[self.first : self.first + size]
        self._reservation = reservation

    @classmethod
    def take(
        cls, lane: SharedMemory, size: int, start: int, reservation: Reservation
    ) -> RequestSlice | None:
        """Take a slice for a body of ``size`` bytes; None if the lane has none."""
        taken = lane.take(size + -start % _ALIGNMENT)
        return None if taken is None else cls(lane, taken, size, start, reservation)

    def count(self, size: int) -> None:
        """Reserve the bytes that have come: those that are announced would cost a client nothing.

        It is beside the lane's own memory, and may exceed the budget.
        """
        self._reservation.resize_unchecked(size)

    def drop(self) -> None:
        """Keep the tensors until the release, although the body is not read any more."""

    def release(self) -> None:
        """Give the slice back, once; the server may still hold it."""
        if self.view:
            self.view = memoryview(b"")
            self._reservation.resize(0)
            self.taken.end_call()
