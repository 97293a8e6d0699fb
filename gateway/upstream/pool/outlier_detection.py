"""Which endpoints of an upstream are left out, by what exchanges and other processes tell."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gateway.errors import escape_for_log
from gateway.routing import health
from gateway.routing.health import NOT_EJECTED, EjectionState, OutlierPolicy
from gateway.upstream.pool.lease import Outcome
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.reachability import Reachability

_LOG_PAUSE = 10.0
"""Seconds for which no other response of 5xx of the same endpoint is logged."""

FIRST_ERROR_STATUS = 400
"""The first status that may tell against an endpoint."""

_log = logging.getLogger("tensorgate.upstream")

EjectionListener = Callable[[str, EjectionState], None]
"""What is told the URL of an endpoint that is ejected, or that answers again, and how it does.

Without a URL, it is told of all endpoints: that they are unreachable, or that one is reachable.
"""


class OutlierDetector:
    """Keeps the health of a pool's members.

    ``clock`` gives seconds. ``doubt`` is called with members that may be other servers by now,
    ``tell`` when what exchanges here meet with changes which are used. ``reachability`` hears which
    calls could connect.
    """

    def __init__(
        self,
        policy: OutlierPolicy,
        clock: Callable[[], float],
        doubt: Callable[[Member], None],
        reachability: Reachability,
        tell: EjectionListener | None = None,
    ) -> None:
        self._policy = policy
        self._reachability = reachability
        self._clock = clock
        self._doubt = doubt
        self._tell = tell
        self._members: tuple[Member, ...] = ()
        self._has_one = False

    def among(self, members: tuple[Member, ...]) -> None:
        """Keep the health of these from now on; one alone is always used."""
        self._members = members
        self._has_one = len(members) == 1
        if self._has_one:
            # Nothing is noted of it from now on, not even how its trial ends.
            members[0].health = NOT_EJECTED

    def start_trial(self, member: Member) -> None:
        """Note that an exchange goes to an endpoint that is, or was, left out."""
        member.health = health.taken(member.health, self._clock())

    def note(self, member: Member, outcome: Outcome, why: str, server_error: int = 0) -> None:
        """Note what an exchange told of an endpoint, and why it failed.

        ``server_error`` is the status of its server's response, if that is 5xx: it is a failed
        call, whatever the policy makes of it.
        """
        if member.leaving:
            return
        # A good response behind good ones costs nothing more.
        is_good = outcome is Outcome.SUCCEEDED and not server_error
        if not is_good or member.calls.failures or self._reachability.failures:
            self._count(member, outcome, why, server_error)
        if not self._has_one:
            self._judge_health(member, outcome, why)

    def _count(self, member: Member, outcome: Outcome, why: str, server_error: int) -> None:
        calls, reachability = member.calls, self._reachability
        unconnected = outcome is Outcome.CONNECT_FAILED
        if unconnected or outcome is Outcome.FAILED:
            self._doubt(member)
            calls.failed(why, bool(server_error), unconnected)
        elif server_error:
            calls.failed(f"it answered {server_error}", True, False)
        elif outcome is Outcome.SUCCEEDED and calls.failures:
            calls.succeeded()
        if server_error:
            self._log_server_error(member, server_error)
        if unconnected:
            reachability.failed(self._members, why)
        elif reachability.failures and (outcome is not Outcome.UNKNOWN or server_error):
            reachability.connected(member.endpoint.url)

    def _log_server_error(self, member: Member, status: int) -> None:
        """Log such a response, of which nothing else tells, once in a while for each endpoint."""
        now, calls = self._clock(), member.calls
        if now >= calls.next_logged:
            calls.next_logged = now + _LOG_PAUSE
            count = calls.responses_5xx
            _log.warning(
                "%s answered %d; responses of 5xx so far: %d", member.endpoint.url, status, count
            )

    def _judge_health(self, member: Member, outcome: Outcome, why: str) -> None:
        before = member.health
        url = member.endpoint.url
        if outcome is Outcome.SUCCEEDED:
            after = health.succeeded(before)
        elif outcome is Outcome.UNKNOWN:
            after = health.left(before)
        else:
            now = self._clock()
            after = health.failed(before, self._others(member), now, self._policy)
            if after.ejections > before.ejections:
                _log.warning(
                    "%s failed %d times in a row: it is left out for %g s; at last: %s",
                    url,
                    after.failures,
                    after.until - now,
                    escape_for_log(why),
                )
                if self._tell is not None:
                    self._tell(url, after)
        if before.ejections and not after.ejections:
            _log.warning("%s is used again", url)
            # One that is used as there is no better one is none to recommend.
            if outcome is Outcome.SUCCEEDED and self._tell is not None:
                self._tell(url, after)
        member.health = after

    def hear(self, member: Member, told: EjectionState) -> None:
        """Note what another process tells of an endpoint, as it is now; that is not told again."""
        if self._has_one:
            return
        before = member.health
        if told.ejections:
            others, now = self._others(member), self._clock()
            after = health.record_remote_ejection(before, told, others, now, self._policy)
        else:
            after = health.record_remote_recovery(before)
        if after.ejections and not before.ejections:
            _log.info("%s: left out, as another worker says", member.endpoint.url)
        elif before.ejections and not after.ejections:
            _log.info("%s: used again, as another worker says", member.endpoint.url)
            self._doubt(member)
        member.health = after

    def classify_status(self, status: int) -> tuple[Outcome, str]:
        """Tell what the status of an answer says of its endpoint, and why that failed."""
        if status < FIRST_ERROR_STATUS or status not in self._policy.statuses:
            return Outcome.SUCCEEDED, ""
        return Outcome.FAILED, f"it answered {status}"

    def _others(self, member: Member) -> list[EjectionState]:
        """Tell how all endpoints but one do."""
        return [each.health for each in self._members if each is not member]
