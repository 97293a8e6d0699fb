"""The number of worker processes, and the share of the limits that each of them has."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.settings.schema import Settings

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The control group of a container is at the root; quotas are usual in containers."""


def worker_count(settings: Settings) -> int:
    """Return the number of worker processes that the settings ask for."""
    return usable_cores() if settings.workers == "auto" else settings.workers


def uses_offload(settings: Settings) -> bool:
    """Tell whether a worker has an offload process: with ``auto``, if a core is left for it."""
    if settings.offload != "auto":
        return settings.offload == "always"
    return settings.workers != "auto" and usable_cores() > settings.workers


def share_per_worker(number: int, workers: int) -> int:
    """Return one worker's share of a limit, at least 1.

    The supervisor distributes connections evenly to workers, and a connection has one request at a
    time. So the shares are equal, and workers need not exchange them.
    """
    return max(1, number // workers)


def usable_cores(quota: Path = _CPU_QUOTA) -> int:
    """Return the number of cores that this process may use, at least 1.

    A quota of CPU time counts as cores, rounded up: cgroups(7), version 2.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        share = -(-int(allowed) // int(period))
    except (OSError, ValueError):  # no such file, or "max": there is no quota
        return cores
    return max(1, min(cores, share))
