"""Settings → the limits that all exchanges of a process share."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.app.build.processes import share_per_worker, worker_count
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.settings.limits import Concurrency
from gateway.settings.schema import Settings

_MIRRORED_PART = 4
"""How many times less than clients' exchanges, and apart from them, copies may hold of bodies."""


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """Hold what counts exchanges and bodies, and the settings by which it does.

    ``copied`` counts the bodies of copies for mirrors.
    """

    declared: Settings
    workers: int
    concurrency_limit: ConcurrencyLimit | None
    held: MemoryBudget
    copied: MemoryBudget

    def apply(self) -> None:
        """Count by these settings from now on."""
        apply_concurrency(self.concurrency_limit, self.declared.concurrency, self.workers)
        self.held.set_limit(_held_bytes(self.declared, self.workers))
        self.copied.set_limit(_copied_bytes(self.declared, self.workers))


def shared_limits(settings: Settings, before: SharedLimits | None = None) -> SharedLimits:
    """Make them; what counts already goes on, by other settings once these take effect."""
    workers = worker_count(settings)
    concurrency_limit = concurrency_limit_of(
        "the gateway", settings.concurrency, workers, before.concurrency_limit if before else None
    )
    if before is None:
        held = MemoryBudget(_held_bytes(settings, workers))
        copied = MemoryBudget(_copied_bytes(settings, workers))
        return SharedLimits(settings, workers, concurrency_limit, held, copied)
    return SharedLimits(settings, workers, concurrency_limit, before.held, before.copied)


def concurrency_limit_of(
    place: str, declared: Concurrency, workers: int, before: ConcurrencyLimit | None = None
) -> ConcurrencyLimit | None:
    """Make the gate of a place, for one of so many workers; None where there is no limit.

    One from ``before`` goes on, as it lets in as many as it did until ``apply_concurrency`` is
    called.
    """
    numbers = _numbers(declared, workers)
    if numbers is None:
        return None
    return before or ConcurrencyLimit(place, *numbers)


def apply_concurrency(
    concurrency_limit: ConcurrencyLimit | None, declared: Concurrency, workers: int
) -> None:
    """Have a gate, if there is one, let in as many as is declared from now on."""
    numbers = _numbers(declared, workers)
    if concurrency_limit is not None and numbers is not None:
        concurrency_limit.reconfigure(*numbers)


def _numbers(declared: Concurrency, workers: int) -> tuple[int, int, float] | None:
    """Give how many are let in, how many wait, and for how many seconds."""
    if declared.max_requests == "unlimited":
        return None
    waiting = share_per_worker(declared.max_queue, workers) if declared.max_queue else 0
    return share_per_worker(declared.max_requests, workers), waiting, declared.queue_timeout


def _held_bytes(declared: Settings, workers: int) -> int:
    return share_per_worker(declared.limits.max_buffered_bytes, workers)


def _copied_bytes(declared: Settings, workers: int) -> int:
    return share_per_worker(declared.limits.max_buffered_bytes // _MIRRORED_PART, workers)
