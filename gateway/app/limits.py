"""Settings → the limits that all exchanges of a process share."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.app.processes import part_of, worker_count
from gateway.exchange.gate import Gate
from gateway.exchange.held import HeldBytes
from gateway.settings.limits import Limits, Places
from gateway.settings.schema import Settings


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """Hold what counts exchanges and bodies, and the settings that it is made of."""

    declared: Limits
    gate: Gate | None
    held: HeldBytes


def shared_limits(settings: Settings, before: SharedLimits | None = None) -> SharedLimits:
    """Make them; where they are declared as ``before``, they go on counting."""
    if before is not None and before.declared == settings.limits:
        return before
    workers = worker_count(settings)
    gate = gate_of("the gateway", settings.limits, workers)
    return SharedLimits(
        settings.limits, gate, HeldBytes(part_of(settings.limits.held_bytes, workers))
    )


def gate_of(place: str, declared: Places, workers: int) -> Gate | None:
    """Make the gate of a place, for one of so many workers; None where there is no limit."""
    if declared.requests == "unlimited":
        return None
    most = part_of(declared.requests, workers)
    waiting = part_of(declared.waiting, workers) if declared.waiting else 0
    return Gate(place, most, waiting, declared.wait_time)
