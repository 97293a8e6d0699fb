"""What all exchanges together hold of bodies."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from gateway.errors import GatewayError
from gateway.proxy.admission.concurrency_limit import overloaded
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.system.buffers import MIN_STREAM_BYTES, BufferAccount


class MemoryBudget:
    """Counts the bytes that calls hold of bodies; together with ``buffers``, ``most`` at a time.

    Those are what connections buffer of bodies in transit, which have their share of the memory.
    """

    def __init__(self, most: int) -> None:
        self.buffers = BufferAccount(most)

    @property
    def total(self) -> int:
        """Give the bytes that are held and buffered."""
        return self.buffers.total

    def reserve(self) -> Reservation:
        """Begin to count for an exchange; nothing of it counts any more once that is closed."""
        return Reservation(self)

    def change(self, size: int) -> None:
        """Count so many bytes more, or fewer; raises GatewayError (503) over the cap."""
        if size > 0 and size > self.buffers.free:
            raise self._full()
        self.buffers.reserved += size

    def admit(self) -> None:
        """Check that there is room for one more call; raises GatewayError (503) if not."""
        if self.buffers.free < MIN_STREAM_BYTES:
            raise self._full()

    def set_limit(self, most: int) -> None:
        """Have another cap from now on; what is held stays, even where that is more."""
        self.buffers.set_limit(most)

    def _full(self) -> GatewayError:
        buffers = self.buffers
        return overloaded(
            f"the gateway holds {buffers.total} bytes of other requests and answers already, "
            f"and {buffers.streams} bodies are in transit; at most {buffers.limit} are held "
            "(limits.max_buffered_bytes)"
        )


class Reservation:
    """What one exchange holds, while its context is open."""

    def __init__(self, held: MemoryBudget) -> None:
        self._held = held
        self._size = 0

    def resize(self, size: int) -> None:
        """Note how many bytes it holds now; raises GatewayError (503) where those are too many."""
        self._held.change(size - self._size)
        self._size = size

    def note(self, size: int) -> None:
        """Note how many bytes it holds now, even too many: what is under way is not broken off."""
        self._held.buffers.reserved += size - self._size
        self._size = size

    def more(self, size: int) -> None:
        """Note that it holds so many bytes more; raises GatewayError (503) as ``resize`` does."""
        self.resize(self._size + size)

    def __enter__(self) -> Self:
        """Hold nothing yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Hold nothing any more."""
        self.resize(0)


class BufferingCodec(Protocol):
    """A codec with work that it does piece by piece, and what it holds of a body, in bytes."""

    @property
    def buffered_bytes(self) -> int:
        """Give the bytes that are held."""

    def step(self) -> bool:
        """Do a piece; tell whether there was one."""


async def work_off(codec: BufferingCodec, holding: Reservation, turns: ConversionScheduler) -> None:
    """Do what a codec has to do, with a turn for others after each piece."""
    while codec.step():
        holding.resize(codec.buffered_bytes)
        await turns.next()
