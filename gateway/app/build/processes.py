"""How many processes serve, and which part of the limits each of them has."""

from __future__ import annotations

from gateway.settings.schema import Settings
from gateway.workers.cores import usable_cores


def worker_count(settings: Settings) -> int:
    """Give the number of processes that the settings ask for."""
    return usable_cores() if settings.workers == "auto" else settings.workers


def uses_offload(settings: Settings) -> bool:
    """Tell whether a process is to have a helper: where cores are left over for it."""
    if settings.offload != "auto":
        return settings.offload == "always"
    return settings.workers != "auto" and usable_cores() > settings.workers


def share_per_worker(number: int, workers: int) -> int:
    """Give one of so many processes its part of what they may have together, at least 1.

    Connections are dealt evenly to processes, and one has one request at a time: so the parts are
    equal, and need not be kept in step.
    """
    return max(1, number // workers)
