"""Endpoint health as pure state: outlier detection by calls, and active health checks.

Every function returns the state after an event. Times are in seconds, by any clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class OutlierPolicy:
    """When an endpoint is ejected, and for how long."""

    consecutive_failures: int = 5
    """Failures in a row that eject an endpoint; 0 turns ejection off."""
    base_ejection_time: float = 10.0
    """Seconds of the first ejection; each one in a row lasts twice as long."""
    max_ejection_time: float = 300.0
    """Seconds."""
    max_ejection_share: float = 0.5
    """The share of an upstream's endpoints that may be ejected at a time; at most 1."""
    failure_statuses: frozenset[int] = frozenset((502, 503, 504))
    """Statuses of the server's own responses that count as failures."""
    latency_factor: float = 0.0
    """How many times as long as its siblings' its calls take, to eject an endpoint; 0 for never."""


@dataclass(frozen=True, slots=True)
class EjectionState:
    """The failures and ejections of an endpoint."""

    failures: int = 0
    """In a row."""
    ejections: int = 0
    """In a row; 0 for an endpoint in use."""
    until: float = 0.0
    """When the current ejection ends."""
    on_trial: bool = False
    """One trial request is in flight; its outcome ends or extends the ejection."""

    def is_usable(self, now: float) -> bool:
        """Tell whether a call may go there; after an ejection, that is a single trial request."""
        return not self.ejections or (now >= self.until and not self.on_trial)


def record_request(state: EjectionState, now: float) -> EjectionState:
    """Record that a call goes there: it is a trial if the ejection has ended.

    Calls during an ejection, which no other endpoint can take, are no trials.
    """
    is_trial = state.ejections > 0 and now >= state.until
    return replace(state, on_trial=True) if is_trial else state


def record_inconclusive(state: EjectionState) -> EjectionState:
    """Record a call that says nothing about the endpoint, such as one whose client left."""
    return replace(state, on_trial=False) if state.on_trial else state


def record_success(state: EjectionState) -> EjectionState:
    """Record a successful call: it ends an ejection and the row of failures."""
    return NOT_EJECTED if state.failures or state.ejections else state


def record_failure(
    state: EjectionState, others: Sequence[EjectionState], now: float, policy: OutlierPolicy
) -> EjectionState:
    """Record a failed call; ``others`` are the other endpoints of the upstream.

    Only a failed trial extends an ejection.
    """
    failures = state.failures + 1
    threshold = policy.consecutive_failures
    is_due = state.on_trial or (not state.ejections and 0 < threshold <= failures)
    if is_due and _may_be_ejected(others, policy):
        return _ejected(replace(state, failures=failures), now, policy)
    # After a failed trial that may not eject again, the endpoint is used: there is no better one.
    return EjectionState(failures) if state.on_trial else replace(state, failures=failures)


def eject(
    state: EjectionState, others: Sequence[EjectionState], now: float, policy: OutlierPolicy
) -> EjectionState:
    """Record that an endpoint in use is to be ejected, for another reason than failures."""
    return _ejected(state, now, policy) if _may_be_ejected(others, policy) else state


def _ejected(state: EjectionState, now: float, policy: OutlierPolicy) -> EjectionState:
    time = policy.base_ejection_time * 2.0 ** min(state.ejections, 32)
    until = now + min(policy.max_ejection_time, time)
    return EjectionState(state.failures, state.ejections + 1, until)


def record_remote_ejection(
    state: EjectionState,
    remote: EjectionState,
    others: Sequence[EjectionState],
    now: float,
    policy: OutlierPolicy,
) -> EjectionState:
    """Record that another worker has ejected the endpoint; ``others`` are as above."""
    if remote.until <= now:
        return state
    if state.ejections:
        # It ends later if a trial failed there. A trial that failed here too must not add up.
        is_news = remote.until > state.until
    else:
        ejects = policy.consecutive_failures > 0 or policy.latency_factor > 0
        is_news = ejects and _may_be_ejected(others, policy)
    if not is_news:
        return state
    return EjectionState(state.failures, max(state.ejections, remote.ejections), remote.until)


def record_remote_recovery(state: EjectionState) -> EjectionState:
    """Record that the endpoint responded to another worker; failures here still count."""
    return NOT_EJECTED if state.ejections else state


def _may_be_ejected(others: Sequence[EjectionState], policy: OutlierPolicy) -> bool:
    ejected = 1 + sum(each.ejections > 0 for each in others)
    return ejected <= policy.max_ejection_share * (1 + len(others))


NOT_EJECTED = EjectionState()


@dataclass(frozen=True, slots=True)
class HealthCheckPolicy:
    """How many health checks in a row change an endpoint's health."""

    healthy_threshold: int = 1
    """Successes that make an unhealthy endpoint healthy."""
    unhealthy_threshold: int = 2
    """Failures that make a healthy endpoint unhealthy."""


@dataclass(frozen=True, slots=True)
class ProbeState:
    """An endpoint's health by active checks."""

    healthy: bool | None = None
    """None before the first check."""
    contrary: int = 0
    """The latest checks in a row that contradict ``healthy``."""


def record_probe(state: ProbeState, success: bool, policy: HealthCheckPolicy) -> ProbeState:
    """Record the result of a health check; the first one decides alone."""
    if state.healthy is None or state.healthy is success:
        return ProbeState(success)
    contrary = state.contrary + 1
    threshold = policy.healthy_threshold if success else policy.unhealthy_threshold
    return ProbeState(success) if contrary >= threshold else replace(state, contrary=contrary)


NOT_PROBED = ProbeState()
