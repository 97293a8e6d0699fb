"""How many workers this machine can feed."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""In a container, where quotas are usual, its own control group stands at the root."""


def usable_cores(quota: Path = _QUOTA) -> int:
    """Give the number of cores that this process may use, at least 1.

    A quota of CPU time counts as cores, rounded up: cgroups(7), version 2.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        share = -(-int(allowed) // int(period))
    except (OSError, ValueError):  # no such file, or "max": there is no quota
        return cores
    return max(1, min(cores, share))
