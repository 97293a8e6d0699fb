"""Passive health: ejects endpoints whose calls fail, and finds upstreams to which none connects.

What one worker finds is shared with the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import ErrorKind, GatewayError, escape_for_log, strip_tracebacks
from gateway.routing import endpoint_health, latency_outliers
from gateway.routing.endpoint_health import NOT_EJECTED, EjectionState, OutlierPolicy
from gateway.sizes import MAX_PROBE_RESPONSE
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.checks import PoolSupervisor, log_level
from gateway.upstream.pool.member import Member, Outcome

_THRESHOLD = 3
"""Connect failures in a row that make the upstream unreachable."""
_UNREACHABLE_REPORT_TTL = 10.0
"""Seconds for which other workers believe that the endpoints are unreachable."""

PROBE_INTERVAL = 1.0
_PROBE_TIMEOUT = 2.0
_PROBE_PATH = "/v2/health/ready"
"""Any response to it will do."""

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


@dataclass(eq=False)
class OutlierDetector:
    """Counts failed calls of a pool's members and ejects those that fail.

    It marks the upstream unreachable after connect failures at all its endpoints, until a call or a
    probe connects, or the gateway has nothing left to probe it with: that is no fault of the
    upstream's.

    ``clock`` gives seconds. ``notify`` is called with ejections and recoveries that calls here
    cause, ``on_failure`` with each failed call.
    """

    upstream: str
    policy: OutlierPolicy
    clock: Callable[[], float]
    supervisor: PoolSupervisor
    notify: EjectionListener
    on_failure: FailureListener
    connect_failures: int = 0
    """Connect failures in a row, at any endpoint."""
    unreachable: str | None = None
    """The last error, while the upstream is unreachable."""
    _last_report: float = 0.0
    _is_probing: bool = False
    _members: tuple[Member, ...] = ()
    _has_single_member: bool = False

    def set_members(self, members: tuple[Member, ...]) -> None:
        """Watch these members from now on; a single one is never ejected."""
        self._members = members
        self._has_single_member = len(members) == 1
        if self._has_single_member:
            # Nothing updates its state from now on, not even the end of a trial.
            members[0].ejection = NOT_EJECTED

    def start_trial(self, member: Member) -> None:
        """Record that a call goes to an endpoint that was ejected before."""
        member.ejection = endpoint_health.record_request(member.ejection, self.clock())

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
        if not is_success or member.calls.failures or self.connect_failures:
            self._count(member, outcome, why, server_error)
        if not self._has_single_member:
            # A slow endpoint is ejected while slow calls run there: that they succeed is no news.
            is_old = began_in_use and member.ejection.ejections and outcome is Outcome.SUCCEEDED
            if not is_old:
                self._update_ejection(member, outcome, why)

    def _count(self, member: Member, outcome: Outcome, why: str, server_error: int) -> None:
        calls = member.calls
        connect_failed = outcome is Outcome.UNREACHABLE
        if outcome.is_failure:
            self.supervisor.recheck(member)
            calls.record_failure(why, connect_failed)
        elif server_error:
            calls.record_failure(why, False)
        if outcome.is_failure or server_error:
            self.on_failure(member.endpoint.url, "5xx" if server_error else outcome.value)
        elif outcome is Outcome.SUCCEEDED and calls.failures:
            calls.record_success()
        if connect_failed:
            self._record_connect_failure(why)
        elif self.connect_failures and (outcome is not Outcome.UNKNOWN or server_error):
            self._mark_reachable(f"{member.endpoint.url} responds")

    def _update_ejection(self, member: Member, outcome: Outcome, why: str) -> None:
        before = member.ejection
        url = member.endpoint.url
        if outcome is Outcome.SUCCEEDED:
            after = endpoint_health.record_success(before)
        elif outcome is Outcome.UNKNOWN:
            after = endpoint_health.record_inconclusive(before)
        else:
            now = self.clock()
            after = endpoint_health.record_failure(before, self._others(member), now, self.policy)
            if after.ejections > before.ejections:
                member.ejection_reason = ""
                # Other workers may know of more failures before the trial than this one.
                times = f"{after.failures} times in a row" if after.failures != 1 else "once"
                failed = "again" if before.ejections else times
                _log.log(
                    log_level(self.notify(url, after)),
                    "%s failed %s: ejected for %g s; last error: %s",
                    url,
                    failed,
                    after.until - now,
                    escape_for_log(why),
                )
        if before.ejections and not after.ejections:
            # After a failure it is used only because too many are ejected: no recovery to share.
            is_known = outcome is Outcome.SUCCEEDED and self.notify(url, after)
            _log.log(log_level(is_known), "%s: ejection ended", url)
        member.ejection = after

    def eject_slow(self, member: Member) -> None:
        """Eject an endpoint whose latency is an outlier, if the policy says so."""
        outlier, before, now = member.outlier, member.ejection, self.clock()
        factor = self.policy.latency_factor
        if outlier is None or not outlier.has_siblings or not 0 < factor <= outlier.factor:
            return
        if before.ejections or self._has_single_member or now < member.slow_until:
            return
        after = endpoint_health.eject(before, self._others(member), now, self.policy)
        if not after.ejections:
            return
        member.ejection, member.ejection_reason = after, str(outlier)
        # Its calls of before say nothing of it once it is used again.
        member.slow_until = after.until + latency_outliers.MEMORY
        url, seconds = member.endpoint.url, after.until - now
        _log.warning("%s is slow: ejected for %g s; %s", url, seconds, outlier)
        self.notify(url, after)

    def record_remote(self, member: Member, remote: EjectionState) -> None:
        """Record another worker's ejection or recovery of an endpoint, without ``notify``."""
        if self._has_single_member:
            return
        before = member.ejection
        if remote.ejections:
            others, now = self._others(member), self.clock()
            after = endpoint_health.record_remote_ejection(before, remote, others, now, self.policy)
        else:
            after = endpoint_health.record_remote_recovery(before)
        if after.ejections and not before.ejections:
            member.ejection_reason = ""
            _log.debug("%s: ejected, as another worker reports", member.endpoint.url)
        elif before.ejections and not after.ejections:
            _log.debug("%s: ejection ended, as another worker reports", member.endpoint.url)
            self.supervisor.recheck(member)
        member.ejection = after

    def _record_connect_failure(self, why: str) -> None:
        self.connect_failures += 1
        if self.unreachable is not None:
            self.unreachable = why
        elif self.connect_failures >= _THRESHOLD and all(
            each.calls.connect_failures for each in self._members
        ):
            message = (
                "upstream %s is not ready: %d calls in a row could not connect; last error: %s"
            )
            self._mark_unreachable(why)
            level = self._notify_unreachable(True)
            _log.log(level, message, self.upstream, self.connect_failures, why)

    def record_remote_unreachable(self, until: float) -> None:
        """Mark the upstream unreachable as another worker reports, and probe it from here.

        ``until`` is the time until which that is valid; it tells one such report from the next.
        """
        if until <= self.clock():
            return
        if until != self._last_report and self.unreachable is None:
            _log.debug("upstream %s is not ready, as another worker reports", self.upstream)
            self._mark_unreachable(f"another worker cannot connect to upstream {self.upstream}")
        self._last_report = until

    def _mark_reachable(self, why: str) -> None:
        self.connect_failures = 0
        if self.unreachable is not None:
            self.unreachable = None
            level = self._notify_unreachable(False)
            _log.log(level, "upstream %s is ready again: %s", self.upstream, why)

    def _mark_unreachable(self, why: str) -> None:
        self.unreachable = why
        if self.supervisor.is_running and not self._is_probing:
            self.supervisor.start_task(self._probe_until_reachable())

    def _notify_unreachable(self, is_unreachable: bool) -> int:
        until = self.clock() + _UNREACHABLE_REPORT_TTL
        return log_level(self.notify("", EjectionState(ejections=int(is_unreachable), until=until)))

    async def _probe_until_reachable(self) -> None:
        """Connect to the endpoints every second until one of them responds.

        A gateway that is not ready gets no calls, so without probes it would stay so.
        """
        self._is_probing = True
        try:
            while self.unreachable is not None:
                await asyncio.sleep(PROBE_INTERVAL)
                results = await asyncio.gather(*map(_probe, self._members), return_exceptions=True)
                for result in results:
                    self._record_probe(result)
        finally:
            self._is_probing = False

    def _record_probe(self, result: Member | BaseException | None) -> None:
        if isinstance(result, GatewayError):
            self._mark_reachable(f"it cannot be asked: {result.message}")
        elif isinstance(result, BaseException):
            # A bug of the gateway must be seen, and must not end the probes.
            _log.error("an endpoint could not be probed", exc_info=result)
        elif result is not None:
            result.calls.record_connect()
            self._mark_reachable(f"{result.endpoint.url} responds")

    def _others(self, member: Member) -> list[EjectionState]:
        return [each.ejection for each in self._members if each is not member]


async def _probe(member: Member) -> Member | GatewayError | None:
    """Return the member if its endpoint responds, whatever the response says; else None.

    If the gateway itself is out of descriptors or ports, return that error.
    """
    for endpoint in member.endpoint.probe_targets:
        try:
            await send_control_request(endpoint, _PROBE_PATH, MAX_PROBE_RESPONSE, _PROBE_TIMEOUT)
        except GatewayError as error:
            strip_tracebacks(error)
            if error.kind is ErrorKind.EXHAUSTED:
                return error
            if error.kind in (ErrorKind.UNREACHABLE, ErrorKind.SERVER_TIMEOUT):
                return None
    return member
