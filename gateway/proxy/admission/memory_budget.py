"""The memory budget: bytes of bodies that all calls together may buffer, else 503."""

from __future__ import annotations

from functools import partial
from typing import Final, Protocol, Self

from gateway.errors import GatewayError
from gateway.observe.metric_cells import Counter
from gateway.proxy.admission.concurrency_limit import overload_error
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.system.buffers import MIN_STREAM_BYTES, NO_ROOM, BufferAccount, ReservedBytes

_MAX_ENDED: Final = 32
"""Bodies that end for one call beside those whose room it takes: as many calls may have come at the
same time. What the ended ones have reserved comes back a little later: if the call needs that, it
is refused."""


class MemoryBudget:
    """Counts what calls reserve for bodies and what connections buffer, up to ``limit`` bytes.

    ``buffers`` counts for connections: the bytes of bodies in transit. ``refusals`` counts
    the calls for which there was no room.
    """

    def __init__(self, limit: int, refusals: Counter | None = None) -> None:
        self.buffers = BufferAccount(limit)
        if refusals is not None:
            self.buffers.on_refusal = partial(refusals.add, 1.0)

    @property
    def total(self) -> int:
        """Return the bytes that are reserved, buffered, and shared with servers."""
        return self.buffers.total

    def reserve(self, call: ReservedBytes | None = None) -> Reservation:
        """Return an empty reservation for one call, which is released when its context ends.

        With a ``call`` of a client, it counts for that, and others may have to make room.
        """
        return Reservation(self, call)

    def adjust(self, size: int, call: ReservedBytes | None = None) -> None:
        """Reserve so many bytes more, or fewer; raises GatewayError (503) over the limit.

        With a ``call`` of a client, others may have to make room, as for its admission.
        """
        if size > 0 and size > self.buffers.free:
            if call is None:
                raise self._full()
            self._make_room(size, call.client)
        self.buffers.reserve(size, call)

    def check_admission(self, client: str = "") -> None:
        """Raise GatewayError (503) if there is no room for one more call, and none can be made.

        ``client`` is whose call it is; see ``BufferAccount.make_room``.
        """
        self._make_room(MIN_STREAM_BYTES, client)

    def _make_room(self, size: int, client: str) -> None:
        # Responses that wait for their clients may take more room than there is.
        left = _MAX_ENDED + max(size, size - self.buffers.free) // MIN_STREAM_BYTES
        while self.buffers.free < size:
            if not left or not self.buffers.make_room(client):
                raise self._full()
            left -= 1

    def set_limit(self, limit: int) -> None:
        """Set another limit; existing reservations stay, even above it."""
        self.buffers.set_limit(limit)

    def _full(self) -> GatewayError:
        self.buffers.on_refusal()
        buffers = self.buffers
        most = buffers.limit + buffers.shared
        return overload_error(
            f"the gateway buffers {buffers.total} bytes of other requests and responses already, "
            f"and {buffers.streams} bodies are in transit; at most {most} bytes may be "
            "buffered (limits.max_buffered_bytes)",
            cause=NO_ROOM,
        )


class Reservation:
    """The bytes that one call has reserved, while its context is open."""

    def __init__(self, budget: MemoryBudget, call: ReservedBytes | None = None) -> None:
        self._budget = budget
        self._call = call
        self._size = 0

    def resize(self, size: int) -> None:
        """Reserve ``size`` bytes in all; raises GatewayError (503) over the limit."""
        self._budget.adjust(size - self._size, self._call)
        self._size = size

    def resize_unchecked(self, size: int) -> None:
        """Reserve ``size`` bytes in all, even over the limit, for a response that has started."""
        self._budget.buffers.reserve(size - self._size, self._call)
        self._size = size

    def grow(self, size: int) -> None:
        """Reserve so many bytes more; raises GatewayError (503) over the limit."""
        self.resize(self._size + size)

    def __enter__(self) -> Self:
        """Return the reservation."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Release all bytes."""
        self.resize(0)


class BufferingCodec(Protocol):
    """A codec that converts step by step and buffers a part of a body."""

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes that it buffers."""

    def step(self) -> bool:
        """Do one step; tell whether there was one."""


async def run_steps(
    codec: BufferingCodec, reservation: Reservation, scheduler: ConversionScheduler
) -> None:
    """Do all steps that a codec has to do, one per time slice."""
    while codec.step():
        reservation.resize(codec.buffered_bytes)
        await scheduler.next_slice()
