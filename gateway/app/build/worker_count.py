"""The number of worker processes, and the share of the limits that each of them has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gateway.build_info import NATIVE
from gateway.settings.schema import Settings
from gateway.settings.values.wording import SettingWarning

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The control group of a container is at the root; quotas are usual in containers."""


def worker_count(settings: Settings) -> int:
    """Return the number of worker processes that the settings ask for."""
    return usable_cores() if settings.workers == "auto" else settings.workers


_MAX_AUTO_THREADS = 4
"""More threads wait for the one that reads and writes: two thirds of the time are conversion."""


def offload_threads(settings: Settings) -> int:
    """Return how many threads of a worker convert: with ``auto``, its share of the spare cores."""
    if not NATIVE:
        return 0
    if settings.offload != "auto":
        return settings.offload
    workers = worker_count(settings)
    return max(0, min((usable_cores() - workers) // workers, _MAX_AUTO_THREADS))


def offload_warnings(settings: Settings) -> Iterator[SettingWarning]:
    """Yield why the threads that the settings ask for are not there."""
    if settings.offload not in ("auto", 0) and not NATIVE:
        yield ("offload",), "there are no threads, as this gateway is not compiled"


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
