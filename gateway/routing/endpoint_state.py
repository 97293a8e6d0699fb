"""The state of an endpoint, and its sentence: everything that operators read takes it from here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_FEW_FAILURES = 3
"""Failures, in a row or not, without which an endpoint is not said to fail."""
_FAILING_SHARE, _STILL_FAILING_SHARE = 0.2, 0.1
"""The share of the last calls that failed, from which an endpoint fails, and until which."""
_EJECTED_ELSEWHERE = "another worker has ejected it"
"""Why an endpoint is ejected of which this worker knows nothing bad."""


class State(Enum):
    """What an operator has to know of an endpoint first."""

    DRAINED = "drained"
    """An operator has taken it out of use."""
    DRAINING = "draining"
    """Its name does not lead there any more."""
    EJECTED = "ejected"
    """It is a last resort, because calls to it failed or were slow."""
    UNHEALTHY = "unhealthy"
    """It is a last resort, because its health checks fail."""
    UNREACHABLE = "unreachable"
    """The last calls could not connect, and none has since."""
    FAILING = "failing"
    """Many of its last calls failed, or it responds to none."""
    SLOW = "slow"
    """Its calls take much longer than at its siblings, or than in its last hour."""
    IN_USE = "in_use"


WORST_FIRST = (
    State.EJECTED,
    State.UNHEALTHY,
    State.UNREACHABLE,
    State.FAILING,
    State.SLOW,
    State.DRAINED,
    State.IN_USE,
    State.DRAINING,
)
"""Which state holds if workers differ; one that a worker still uses is not ``draining``."""

OUT_OF_USE = (State.EJECTED, State.UNHEALTHY, State.UNREACHABLE)
"""States from which an endpoint recovers."""


@dataclass(frozen=True, slots=True)
class RecentCalls:
    """What the calls of all workers have said of an endpoint lately."""

    calls: float = 0.0
    failures: float = 0.0
    seconds: float = 0.0
    """The time in which these were."""
    succeeded_at: float = 0.0
    """When a call last succeeded: Unix time."""
    failed_at: float = 0.0
    """When a call last failed: Unix time."""
    silence: str = ""
    """That it responds to no call, in a sentence; empty if it does."""


NO_CALLS = RecentCalls()


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker knows of an endpoint."""

    drained: bool
    draining: bool
    ejection_seconds: float | None
    """Seconds that its ejection still lasts; None without one."""
    ejection_reason: str
    """Why it was ejected, if it was not for failures in a row."""
    health_check_failure: str | None
    failures: int
    """In a row."""
    connect_failures: int
    """In a row."""
    last_error: str
    last_error_at: float
    """Unix time."""
    recovered_at: float
    """When it was last in use again after it got no calls, or no call could connect: Unix time."""
    recent: RecentCalls
    slowness: str
    """How its latency is an outlier; empty if it is not."""


def find_state(facts: Facts, before: State) -> tuple[State, str]:
    """Return the state of an endpoint, and why in a sentence, which is empty if all is well.

    ``before`` is its state until now.
    """
    if facts.drained:
        return State.DRAINED, "taken out of use by an operator"
    if facts.draining:
        return State.DRAINING, "its name does not lead there any more: calls in progress finish"
    row = _failures_in_a_row(facts)
    if (seconds := facts.ejection_seconds) is not None:
        until = f"for {seconds:.0f} s" if seconds >= 1 else "until a trial call succeeds"
        reason = facts.ejection_reason or (row if facts.failures else facts.slowness or row)
        return State.EJECTED, f"ejected {until}: {reason or _EJECTED_ELSEWHERE}"
    if facts.health_check_failure is not None:
        sentence = _with_reason("its health check fails", facts.health_check_failure)
        return State.UNHEALTHY, sentence
    recent = facts.recent
    none_succeeded = facts.last_error_at >= recent.succeeded_at
    if none_succeeded and facts.connect_failures >= _FEW_FAILURES:
        return State.UNREACHABLE, row
    if failure := _describe_failures(facts, row, none_succeeded, before):
        return State.FAILING, failure
    if facts.slowness:
        return State.SLOW, facts.slowness
    return State.IN_USE, row if facts.failures else ""


def _describe_failures(facts: Facts, row: str, none_succeeded: bool, before: State) -> str:
    """Return how an endpoint fails; empty if it does not.

    Of an endpoint that has recovered, the failures before that are over, though they are recent.
    """
    if none_succeeded and facts.failures >= _FEW_FAILURES:
        return row
    recent = facts.recent
    if recent.silence:
        return recent.silence
    if before in OUT_OF_USE or recent.failed_at < facts.recovered_at:
        return ""
    was_failing = before is State.FAILING
    share = _STILL_FAILING_SHARE if was_failing else _FAILING_SHARE
    few = 1 if was_failing else _FEW_FAILURES
    if recent.failures < few or recent.failures < share * recent.calls:
        return ""
    sentence = (
        f"{recent.failures:.0f} of its {recent.calls:.0f} calls"
        f" of the last {recent.seconds:.0f} s failed"
    )
    return f"{sentence}; last error: {facts.last_error}" if facts.last_error else sentence


def _failures_in_a_row(facts: Facts) -> str:
    count = facts.failures
    if not count:  # another worker's
        return facts.last_error
    return _with_reason(f"{count} failure{'s' if count != 1 else ''} in a row", facts.last_error)


def _with_reason(sentence: str, reason: str) -> str:
    return f"{sentence}: {reason}" if reason else sentence
