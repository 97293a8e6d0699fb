"""Which endpoints are used: those that fail are left out for a while, and then tried again.

Failures are those of exchanges, and of probes, which ask an endpoint how it is. Pure functions of
what happened and the time, in seconds by any clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class OutlierPolicy:
    """When an endpoint is ejected, and for how long."""

    failures: int = 5
    """Failures in a row, from which on it is; 0 for never."""
    time: float = 10.0
    """Seconds for which it is ejected the first time; each time in a row they double."""
    longest: float = 300.0
    """Seconds at most."""
    most: float = 0.5
    """Share of an upstream's endpoints that may be ejected at a time."""
    statuses: frozenset[int] = frozenset((502, 503, 504))
    """Those of a server's own answers that are failures of the endpoint."""


@dataclass(frozen=True, slots=True)
class EjectionState:
    """What is known of an endpoint."""

    failures: int = 0
    """In a row."""
    ejections: int = 0
    """In a row; 0 for an endpoint in use."""
    until: float = 0.0
    """When the last of them ends."""
    on_trial: bool = False
    """One exchange finds out whether the endpoint can be used again."""

    def is_usable(self, now: float) -> bool:
        """Tell whether an exchange may go there: one alone where the ejection has just ended."""
        return not self.ejections or (now >= self.until and not self.on_trial)


def taken(health: EjectionState, now: float) -> EjectionState:
    """Note that an exchange goes there: a trial, if the ejection has ended.

    While it lasts, exchanges come that no other endpoint can take; they are none.
    """
    is_trial = health.ejections > 0 and now >= health.until
    return replace(health, on_trial=True) if is_trial else health


def left(health: EjectionState) -> EjectionState:
    """Note that an exchange ended that tells nothing of the endpoint: its client left, say."""
    return replace(health, on_trial=False) if health.on_trial else health


def succeeded(health: EjectionState) -> EjectionState:
    """Note that the endpoint answered."""
    return NOT_EJECTED if health.failures or health.ejections else health


def failed(
    health: EjectionState, others: Sequence[EjectionState], now: float, policy: OutlierPolicy
) -> EjectionState:
    """Note that the endpoint failed; ``others`` are those of the same upstream.

    An ejection is made longer by a failed trial alone.
    """
    failures = health.failures + 1
    is_due = health.on_trial or (not health.ejections and 0 < policy.failures <= failures)
    if is_due and _may_be_ejected(others, policy):
        time = min(policy.longest, policy.time * 2.0 ** min(health.ejections, 32))
        return EjectionState(failures, health.ejections + 1, now + time)
    # One that was on trial and may not be ejected again is used, as there is no better one.
    return EjectionState(failures) if health.on_trial else replace(health, failures=failures)


def record_remote_ejection(
    health: EjectionState,
    told: EjectionState,
    others: Sequence[EjectionState],
    now: float,
    policy: OutlierPolicy,
) -> EjectionState:
    """Note that another process has ejected the endpoint, as it tells; its failures are its own.

    ``others`` are those of the same upstream.
    """
    if told.until <= now:
        return health
    if health.ejections:
        # Later than here, if a trial failed there: so one that fails here too adds nothing to it.
        is_news = told.until > health.until
    else:
        is_news = policy.failures > 0 and _may_be_ejected(others, policy)
    if not is_news:
        return health
    return EjectionState(health.failures, max(health.ejections, told.ejections), told.until)


def record_remote_recovery(health: EjectionState) -> EjectionState:
    """Note that the endpoint answers another process; what fails here still counts."""
    return NOT_EJECTED if health.ejections else health


def _may_be_ejected(others: Sequence[EjectionState], policy: OutlierPolicy) -> bool:
    ejected = 1 + sum(each.ejections > 0 for each in others)
    return ejected <= policy.most * (1 + len(others))


NOT_EJECTED = EjectionState()


@dataclass(frozen=True, slots=True)
class HealthCheckPolicy:
    """When probes change what is thought of an endpoint."""

    healthy: int = 1
    """Good ones in a row that make an unhealthy endpoint healthy."""
    unhealthy: int = 2
    """Bad ones in a row that make a healthy endpoint unhealthy."""


@dataclass(frozen=True, slots=True)
class ProbeState:
    """What the probes of an endpoint say."""

    healthy: bool | None = None
    """None before the first of them."""
    against: int = 0
    """Those in a row, up to the last one, that say otherwise."""


def probed(before: ProbeState, well: bool, policy: HealthCheckPolicy) -> ProbeState:
    """Note what a probe says; the first one decides alone, as nothing speaks against it."""
    if before.healthy is None or before.healthy is well:
        return ProbeState(well)
    against = before.against + 1
    if against >= (policy.healthy if well else policy.unhealthy):
        return ProbeState(well)
    return replace(before, against=against)


NOT_PROBED = ProbeState()
