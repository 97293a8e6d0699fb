"""Settings → the limits that all exchanges of a process share."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.app.build.processes import part_of, worker_count
from gateway.proxy.admission.concurrency_limit import Gate
from gateway.proxy.admission.memory_budget import HeldBytes
from gateway.settings.limits import Limits, Places
from gateway.settings.schema import Settings

_MIRRORED_PART = 4
"""How many times less than clients' exchanges, and apart from them, copies may hold of bodies."""


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """Hold what counts exchanges and bodies, and the settings by which it does.

    ``copied`` counts the bodies of copies for mirrors.
    """

    declared: Limits
    workers: int
    gate: Gate | None
    held: HeldBytes
    copied: HeldBytes

    def take_effect(self) -> None:
        """Count by these settings from now on."""
        set_places(self.gate, self.declared, self.workers)
        self.held.allow(_held_bytes(self.declared, self.workers))
        self.copied.allow(_copied_bytes(self.declared, self.workers))


def shared_limits(settings: Settings, before: SharedLimits | None = None) -> SharedLimits:
    """Make them; what counts already goes on, by other settings once these take effect."""
    limits, workers = settings.limits, worker_count(settings)
    if before is None:
        held = HeldBytes(_held_bytes(limits, workers))
        copied = HeldBytes(_copied_bytes(limits, workers))
        return SharedLimits(limits, workers, gate_of("the gateway", limits, workers), held, copied)
    gate = gate_of("the gateway", limits, workers, before.gate)
    return SharedLimits(limits, workers, gate, before.held, before.copied)


def gate_of(place: str, declared: Places, workers: int, before: Gate | None = None) -> Gate | None:
    """Make the gate of a place, for one of so many workers; None where there is no limit.

    One from ``before`` goes on, as it lets in as many as it did until ``set_places`` is called.
    """
    numbers = _numbers(declared, workers)
    if numbers is None:
        return None
    return before or Gate(place, *numbers)


def set_places(gate: Gate | None, declared: Places, workers: int) -> None:
    """Have a gate, if there is one, let in as many as is declared from now on."""
    numbers = _numbers(declared, workers)
    if gate is not None and numbers is not None:
        gate.change(*numbers)


def _numbers(declared: Places, workers: int) -> tuple[int, int, float] | None:
    """Give how many are let in, how many wait, and for how many seconds."""
    if declared.requests == "unlimited":
        return None
    waiting = part_of(declared.waiting, workers) if declared.waiting else 0
    return part_of(declared.requests, workers), waiting, declared.wait_time


def _held_bytes(declared: Limits, workers: int) -> int:
    return part_of(declared.held_bytes, workers)


def _copied_bytes(declared: Limits, workers: int) -> int:
    return part_of(declared.held_bytes // _MIRRORED_PART, workers)
