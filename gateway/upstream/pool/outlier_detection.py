"""Passive health: ejects endpoints whose calls fail, and shares that with other workers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gateway.errors import escape_for_log
from gateway.routing import endpoint_health, latency_outliers
from gateway.routing.endpoint_health import NOT_EJECTED, EjectionState, OutlierPolicy
from gateway.upstream.pool.member import Member, Outcome
from gateway.upstream.pool.reachability import Reachability, log_level

FIRST_ERROR_STATUS = 400
"""The first status that the policy may count as a failure."""

_log = logging.getLogger("tensorgate.upstream")

EjectionListener = Callable[[str, EjectionState], bool | None]
"""Called with the URL and state of an endpoint that calls here have ejected or recovered.

An empty URL stands for all endpoints: with an ejection they are unreachable, without one not. It
returns True if another worker has told the same before, which is no news for the log.
"""

FailureListener = Callable[[str, str], None]
"""Called with the URL of an endpoint, and how a call to it failed: an Outcome's value, or 5xx."""


def ignore(endpoint: str, event: object) -> None:
    """Listen to nothing."""


class OutlierDetector:
    """Counts failed calls of a pool's members and ejects those that fail.

    ``clock`` gives seconds. ``recheck`` gets members that may be another server by now. ``notify``
    is called with ejections and recoveries that calls here cause, ``on_failure`` with each failed
    call. ``reachability`` is called with the endpoints that calls could or could not connect to.
    """

    def __init__(
        self,
        policy: OutlierPolicy,
        clock: Callable[[], float],
        recheck: Callable[[Member], None],
        reachability: Reachability,
        notify: EjectionListener,
        on_failure: FailureListener,
    ) -> None:
        self._policy = policy
        self._reachability = reachability
        self._clock = clock
        self._recheck = recheck
        self._notify = notify
        self._on_failure = on_failure
        self._members: tuple[Member, ...] = ()
        self._has_single_member = False

    def set_members(self, members: tuple[Member, ...]) -> None:
        """Watch these members from now on; a single one is never ejected."""
        self._members = members
        self._has_single_member = len(members) == 1
        if self._has_single_member:
            # Nothing updates its state from now on, not even the end of a trial.
            members[0].ejection = NOT_EJECTED

    def start_trial(self, member: Member) -> None:
        """Record that a call goes to an endpoint that was ejected before."""
        member.ejection = endpoint_health.record_request(member.ejection, self._clock())

    def record(
        self,
        member: Member,
        outcome: Outcome,
        why: str,
        server_error: int = 0,
        began_in_use: bool = False,
    ) -> None:
        """Record a call's outcome; ``why`` is the error of a failure.

        ``server_error`` is the status of the server's response if that is 5xx, and ``why`` says so.
        Such a call counts as failed, whatever the policy makes of it. ``began_in_use`` tells that
        the call began when the endpoint was not ejected.
        """
        if member.leaving:
            return
        # A success after successes must cost nothing: it has nothing to reset.
        is_success = outcome is Outcome.SUCCEEDED and not server_error
        if not is_success or member.calls.failures or self._reachability.failures:
            self._count(member, outcome, why, server_error)
        if not self._has_single_member:
            # A slow endpoint is ejected while slow calls run there: that they succeed is no news.
            is_old = began_in_use and member.ejection.ejections and outcome is Outcome.SUCCEEDED
            if not is_old:
                self._update_ejection(member, outcome, why)

    def _count(self, member: Member, outcome: Outcome, why: str, server_error: int) -> None:
        calls, reachability = member.calls, self._reachability
        connect_failed = outcome is Outcome.UNREACHABLE
        if outcome.is_failure:
            self._recheck(member)
            calls.record_failure(why, connect_failed)
        elif server_error:
            calls.record_failure(why, False)
        if outcome.is_failure or server_error:
            self._on_failure(member.endpoint.url, "5xx" if server_error else outcome.value)
        elif outcome is Outcome.SUCCEEDED and calls.failures:
            calls.record_success()
        if connect_failed:
            reachability.record_connect_failure(self._members, why)
        elif reachability.failures and (outcome is not Outcome.UNKNOWN or server_error):
            reachability.record_connect(member.endpoint.url)

    def _update_ejection(self, member: Member, outcome: Outcome, why: str) -> None:
        before = member.ejection
        url = member.endpoint.url
        if outcome is Outcome.SUCCEEDED:
            after = endpoint_health.record_success(before)
        elif outcome is Outcome.UNKNOWN:
            after = endpoint_health.record_inconclusive(before)
        else:
            now = self._clock()
            after = endpoint_health.record_failure(before, self._others(member), now, self._policy)
            if after.ejections > before.ejections:
                member.ejection_reason = ""
                # Other workers may know of more failures before the trial than this one.
                failed = "again" if before.ejections else _times_in_a_row(after.failures)
                _log.log(
                    log_level(self._notify(url, after)),
                    "%s failed %s: ejected for %g s; last error: %s",
                    url,
                    failed,
                    after.until - now,
                    escape_for_log(why),
                )
        if before.ejections and not after.ejections:
            # After a failure it is used only because too many are ejected: no recovery to share.
            is_known = outcome is Outcome.SUCCEEDED and self._notify(url, after)
            _log.log(log_level(is_known), "%s: ejection ended", url)
        member.ejection = after

    def eject_slow(self, member: Member) -> None:
        """Eject an endpoint whose latency is an outlier, if the policy says so."""
        outlier, before, now = member.outlier, member.ejection, self._clock()
        factor = self._policy.latency_factor
        if outlier is None or not outlier.has_siblings or not 0 < factor <= outlier.factor:
            return
        if before.ejections or self._has_single_member or now < member.slow_until:
            return
        after = endpoint_health.eject(before, self._others(member), now, self._policy)
        if not after.ejections:
            return
        member.ejection, member.ejection_reason = after, str(outlier)
        # Its calls of before say nothing of it once it is used again.
        member.slow_until = after.until + latency_outliers.MEMORY
        url, seconds = member.endpoint.url, after.until - now
        _log.warning("%s is slow: ejected for %g s; %s", url, seconds, outlier)
        self._notify(url, after)

    def record_remote(self, member: Member, remote: EjectionState) -> None:
        """Record another worker's ejection or recovery of an endpoint, without ``notify``."""
        if self._has_single_member:
            return
        before = member.ejection
        if remote.ejections:
            others, now = self._others(member), self._clock()
            after = endpoint_health.record_remote_ejection(
                before, remote, others, now, self._policy
            )
        else:
            after = endpoint_health.record_remote_recovery(before)
        if after.ejections and not before.ejections:
            member.ejection_reason = ""
            _log.debug("%s: ejected, as another worker reports", member.endpoint.url)
        elif before.ejections and not after.ejections:
            _log.debug("%s: ejection ended, as another worker reports", member.endpoint.url)
            self._recheck(member)
        member.ejection = after

    def classify_status(self, status: int) -> tuple[Outcome, str]:
        """Return what a response's status says about the endpoint, and the error if it failed."""
        if status < FIRST_ERROR_STATUS or status not in self._policy.failure_statuses:
            return Outcome.SUCCEEDED, ""
        return Outcome.FAILED, f"it returned {status}"

    def _others(self, member: Member) -> list[EjectionState]:
        return [each.ejection for each in self._members if each is not member]


def _times_in_a_row(failures: int) -> str:
    return f"{failures} times in a row" if failures != 1 else "once"
