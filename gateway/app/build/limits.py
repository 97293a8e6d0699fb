"""Settings → the limits that all calls of a worker share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gateway.app.build.worker_count import share_per_worker, worker_count
from gateway.errors import upstream_name
from gateway.observe.gateway_metrics import GatewayMetrics, LimitMetrics
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.settings.limits import Concurrency
from gateway.settings.schema import Settings
from gateway.settings.values.wording import SettingWarning

MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""That of the container, whose control group is at the root."""
_WORKER = 160 * 2**20
"""Bytes of a worker beside what it buffers; docs/memory.md has the formula."""

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
        limit, mirror_limit = _memory_limits(self.declared, self.workers)
        self.memory_budget.set_limit(limit)
        self.mirror_memory_budget.set_limit(mirror_limit)


def build_shared_limits(
    settings: Settings, metrics: GatewayMetrics, before: SharedLimits | None = None
) -> SharedLimits:
    """Build the limits; those from ``before`` go on counting, and change when applied."""
    workers = worker_count(settings)
    last = before and before.concurrency_limit
    concurrency = build_concurrency_limit("", settings.concurrency, workers, metrics, last)
    if before is not None:
        return before._replace(declared=settings, workers=workers, concurrency_limit=concurrency)
    limit, mirror_limit = _memory_limits(settings, workers)
    return SharedLimits(
        settings,
        workers,
        concurrency,
        MemoryBudget(limit, metrics.memory_refusals("memory")),
        MemoryBudget(mirror_limit, metrics.memory_refusals("mirror_memory")),
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


def memory_warnings(settings: Settings) -> Iterator[SettingWarning]:
    """Yield each size of shared memory with which the gateway does not fit into its container."""
    try:
        limit = int(MEMORY_LIMIT.read_text())
    except (OSError, ValueError):  # no such file, or "max": there is no limit
        return
    workers = worker_count(settings)
    needed = workers * _WORKER + settings.limits.max_buffered_bytes * 5 // 4
    for name, upstream in settings.upstreams.items():
        if (shared := upstream.shared_memory) is not None and shared.size is not None:
            needed += workers * len(upstream.endpoints) * shared.size
            if needed > limit:
                text = f"with it, the gateway may take {needed >> 20} MiB, and its container has "
                text += f"{limit >> 20} MiB: docs/memory.md"
                yield ("upstreams", name, "shared_memory", "size"), text


def _memory_limits(declared: Settings, workers: int) -> tuple[int, int]:
    """Return the bytes of bodies that a worker buffers, and those of mirrored copies."""
    most = declared.limits.max_buffered_bytes
    return share_per_worker(most, workers), share_per_worker(most // _MIRROR_DIVISOR, workers)
