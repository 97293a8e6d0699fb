"""The state of an endpoint, and its sentence: everything that operators read takes it from here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from gateway.routing.endpoint_health import NOT_EJECTED, NOT_PROBED, EjectionState, ProbeState
from gateway.routing.latency_outliers import Outlier

_QUOTED_ERROR = 300
"""Characters of an error that are stored."""
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


@dataclass(slots=True)
class CallStats:
    """Counts the failed calls of an endpoint and stores the last error.

    A call fails without a complete response, or with a response of 5xx. Errors are stored as text:
    an exception's traceback would keep its frames alive, and with them request bodies.
    """

    failures: int = 0
    """In a row."""
    connect_failures: int = 0
    """In a row: calls that got no connection."""
    failures_total: int = 0
    last_error: str = ""
    last_error_time: float = 0.0
    """In seconds since 1970."""

    def record_failure(self, why: str, is_connect_failure: bool) -> None:
        """Count a failed call and store its error."""
        self.failures += 1
        self.failures_total += 1
        self.connect_failures = self.connect_failures + 1 if is_connect_failure else 0
        self.last_error = why[:_QUOTED_ERROR]
        self.last_error_time = time.time()

    def record_connect(self) -> None:
        """End the row of failures to connect."""
        if self.failures == self.connect_failures:
            self.failures = 0
        self.connect_failures = 0

    def record_success(self) -> None:
        """End the row of failures."""
        self.failures = self.connect_failures = 0


@dataclass(slots=True, eq=False, kw_only=True)
class EndpointRecord:
    """What a worker knows of an endpoint, and the state in which that is."""

    drained: bool = False
    """An operator has taken it out of use: it gets no new calls until it is restored."""
    leaving: bool = False
    """It gets no new calls; those in flight finish."""
    ejection: EjectionState = NOT_EJECTED
    ejection_reason: str = ""
    """Why it was ejected, if it was not for failures in a row."""
    probed: ProbeState = NOT_PROBED
    reason: str = ""
    """The result of the last health check."""
    calls: CallStats = field(default_factory=CallStats)
    recent: RecentCalls = NO_CALLS
    """What the last calls of all workers have said of it."""
    outlier: Outlier | None = None
    """How its latency is an outlier; None if it is not."""
    current: State = State.IN_USE
    since: float = field(default_factory=time.time)
    """When it came into this state: Unix time."""
    recovered_at: float = 0.0
    """When it last came out of a state in which it got no calls, or none could connect."""

    @property
    def is_healthy(self) -> bool:
        """Tell whether health checks allow calls; without checks they do."""
        return self.probed.healthy is not False

    def find_state(self, now: float) -> str:
        """Find the state of now, and since when it is.

        Return why, in a sentence, which is empty if all is well.
        """
        before = self.current
        self.current, sentence = self._judge(now)
        if self.current is not before:
            self.since = time.time()
            if before in OUT_OF_USE and self.current not in OUT_OF_USE:
                self.recovered_at = self.since
        return sentence

    def _judge(self, now: float) -> tuple[State, str]:
        if self.drained:
            return State.DRAINED, "taken out of use by an operator"
        if self.leaving:
            return State.DRAINING, "its name does not lead there any more: calls in progress finish"
        calls, row, slowness = self.calls, self._failures_in_a_row(), str(self.outlier or "")
        if self.ejection.ejections:
            seconds = self.ejection.until - now
            until = f"for {seconds:.0f} s" if seconds >= 1 else "until a trial call succeeds"
            reason = self.ejection_reason or (row if calls.failures else slowness or row)
            return State.EJECTED, f"ejected {until}: {reason or _EJECTED_ELSEWHERE}"
        if not self.is_healthy:
            return State.UNHEALTHY, _with_reason("its health check fails", self.reason)
        none_succeeded = calls.last_error_time >= self.recent.succeeded_at
        if none_succeeded and calls.connect_failures >= _FEW_FAILURES:
            return State.UNREACHABLE, row
        if none_succeeded and calls.failures >= _FEW_FAILURES:
            return State.FAILING, row
        if failure := self.recent.silence or self._share_of_failures():
            return State.FAILING, failure
        if slowness:
            return State.SLOW, slowness
        return State.IN_USE, row if calls.failures else ""

    def _share_of_failures(self) -> str:
        """Return how many of its last calls have failed; empty if these are few.

        Of an endpoint that has recovered, the failures before that are over, though they are
        recent.
        """
        recent = self.recent
        if self.current in OUT_OF_USE or recent.failed_at < self.recovered_at:
            return ""
        was_failing = self.current is State.FAILING
        share = _STILL_FAILING_SHARE if was_failing else _FAILING_SHARE
        few = 1 if was_failing else _FEW_FAILURES
        if recent.failures < few or recent.failures < share * recent.calls:
            return ""
        sentence = (
            f"{recent.failures:.0f} of its {recent.calls:.0f} calls"
            f" of the last {recent.seconds:.0f} s failed"
        )
        error = self.calls.last_error
        return f"{sentence}; last error: {error}" if error else sentence

    def _failures_in_a_row(self) -> str:
        count, error = self.calls.failures, self.calls.last_error
        if not count:  # another worker's
            return error
        return _with_reason(f"{count} failure{'s' if count != 1 else ''} in a row", error)


def _with_reason(sentence: str, reason: str) -> str:
    return f"{sentence}: {reason}" if reason else sentence
