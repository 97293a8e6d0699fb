"""Settings → the limits that all calls of a worker share."""

from __future__ import annotations

from typing import NamedTuple

from gateway.app.build.worker_count import share_per_worker, worker_count
from gateway.errors import upstream_name
from gateway.observe.gateway_metrics import GatewayMetrics, LimitMetrics
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.settings.limits import Concurrency
from gateway.settings.schema import Settings

_MIRROR_DIVISOR = 4
"""Mirrored copies have a budget of their own: clients' budget divided by this."""


class SharedLimits(NamedTuple):
    """The limits of calls and of buffered bodies, with the settings that they have once applied."""

    declared: Settings
    workers: int
    concurrency_limit: ConcurrencyLimit | None
    memory_budget: MemoryBudget
    mirror_memory_budget: MemoryBudget

    def apply(self) -> None:
        """Limit by these settings from now on."""
        apply_concurrency(self.concurrency_limit, self.declared.concurrency, self.workers)
        self.memory_budget.set_limit(_memory_limit(self.declared, self.workers))
        self.mirror_memory_budget.set_limit(_mirror_memory_limit(self.declared, self.workers))


def build_shared_limits(
    settings: Settings, metrics: GatewayMetrics, before: SharedLimits | None = None
) -> SharedLimits:
    """Build the limits; those from ``before`` go on counting, and change when applied."""
    workers = worker_count(settings)
    if before is not None:
        memory_budget, mirror_memory_budget = before.memory_budget, before.mirror_memory_budget
    else:
        memory_budget = MemoryBudget(
            _memory_limit(settings, workers), metrics.memory_refusals("memory")
        )
        mirror_memory_budget = MemoryBudget(
            _mirror_memory_limit(settings, workers), metrics.memory_refusals("mirror_memory")
        )
    return SharedLimits(
        settings,
        workers,
        build_concurrency_limit(
            "",
            settings.concurrency,
            workers,
            metrics,
            before.concurrency_limit if before else None,
        ),
        memory_budget,
        mirror_memory_budget,
    )


def build_concurrency_limit(
    upstream: str,
    declared: Concurrency,
    workers: int,
    metrics: GatewayMetrics,
    before: ConcurrencyLimit | None = None,
) -> ConcurrencyLimit | None:
    """Build one worker's share of an upstream's concurrency limit; None without a limit.

    An empty name stands for the limit of all calls.
    The one from ``before`` goes on as it is until ``apply_concurrency``.
    """
    numbers = _numbers(declared, workers)
    if numbers is None:
        return None
    name = upstream_name(upstream) if upstream else "the gateway"
    return before or ConcurrencyLimit(name, *numbers, LimitMetrics(metrics.writer, upstream))


def apply_concurrency(limit: ConcurrencyLimit | None, declared: Concurrency, workers: int) -> None:
    """Change a concurrency limit, if there is one, to what is declared."""
    numbers = _numbers(declared, workers)
    if limit is not None and numbers is not None:
        limit.reconfigure(*numbers)


def _numbers(declared: Concurrency, workers: int) -> tuple[int, int, float] | None:
    """Return how many calls run, how many are queued, and for how many seconds."""
    if declared.max_requests == "unlimited":
        return None
    queue = share_per_worker(declared.max_queue, workers) if declared.max_queue else 0
    return share_per_worker(declared.max_requests, workers), queue, declared.queue_timeout


def _memory_limit(declared: Settings, workers: int) -> int:
    return share_per_worker(declared.limits.max_buffered_bytes, workers)


def _mirror_memory_limit(declared: Settings, workers: int) -> int:
    return share_per_worker(declared.limits.max_buffered_bytes // _MIRROR_DIVISOR, workers)
