"""The endpoints of one upstream."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from gateway.errors import GatewayError
from gateway.routing import health
from gateway.routing.balancer import least_outstanding
from gateway.routing.health import HEALTHY, EjectionPolicy, Health
from gateway.upstream.base import UpstreamEndpoint

_log = logging.getLogger("tensorgate.upstream")


class Outcome(Enum):
    """What an exchange tells of its endpoint."""

    ANSWERED = "answered"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(slots=True, eq=False)
class Member:
    """An endpoint of a pool, and how it does."""

    endpoint: UpstreamEndpoint
    outstanding: int = 0
    """Exchanges under way."""
    health: Health = HEALTHY


class Pool:
    """Lends endpoints to exchanges: of those that do not fail, the least busy one first.

    ``clock`` gives seconds.
    """

    def __init__(
        self,
        endpoints: Sequence[UpstreamEndpoint],
        ejection: EjectionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members = tuple(Member(endpoint) for endpoint in endpoints)
        self.endpoints = tuple(endpoints)
        self.has_one = len(self.members) == 1
        """There is no other to turn to, so that it does not matter how it does."""
        self.turn = 0
        """Endpoints lent so far."""
        self._ejection = ejection or EjectionPolicy()
        self._clock = clock

    @property
    def outstanding(self) -> list[int]:
        """Give the exchanges under way at each endpoint."""
        return [member.outstanding for member in self.members]

    def endpoint(self, but: Collection[UpstreamEndpoint] = ()) -> Loan:
        """Lend an endpoint for the length of an exchange; it counts once it is taken.

        One that is none of ``but`` is preferred to one that does not fail.
        """
        if self.has_one:
            return Loan(self, self.members[0])
        others = [member for member in self.members if member.endpoint not in but]
        now = self._clock()
        usable = [member for member in others if member.health.is_usable(now)]
        allowed = usable or others or self.members
        index = least_outstanding([member.outstanding for member in allowed], self.turn)
        return Loan(self, allowed[index])

    def every_endpoint(self) -> list[Loan]:
        """Lend each endpoint, those that are left out too, for which that is no trial."""
        return [Loan(self, member, is_trial=False) for member in self.members]

    def note(self, member: Member, outcome: Outcome, why: str) -> None:
        """Note what an exchange told of an endpoint, and why it failed."""
        before = member.health
        url = member.endpoint.url
        if outcome is Outcome.ANSWERED:
            after = health.succeeded(before)
        elif outcome is Outcome.UNKNOWN:
            after = health.left(before)
        else:
            now = self._clock()
            others = [each.health for each in self.members if each is not member]
            after = health.failed(before, others, now, self._ejection)
            if after.ejections > before.ejections:
                _log.warning(
                    "%s failed %d times in a row: it is left out for %g s; at last: %s",
                    url,
                    after.failures,
                    after.until - now,
                    why,
                )
        if before.ejections and not after.ejections:
            _log.warning("%s is used again", url)
        member.health = after

    async def close(self) -> None:
        """Close the connections that no exchange uses."""
        for endpoint in self.endpoints:
            await endpoint.close()


class Loan:
    """An endpoint lent, while its context is open, or until it is given back."""

    def __init__(self, pool: Pool, member: Member, is_trial: bool = True) -> None:
        self._pool = pool
        self._member = member
        self._is_trial = is_trial
        self.endpoint = member.endpoint

    def take(self) -> UpstreamEndpoint:
        """Count the exchange, and give the endpoint."""
        pool, member = self._pool, self._member
        member.outstanding += 1
        pool.turn += 1
        if self._is_trial and not pool.has_one:
            member.health = health.taken(member.health)
        return self.endpoint

    def give_back(self, outcome: Outcome, why: str = "") -> None:
        """Count the exchange no more; ``why`` tells of a failure."""
        self._member.outstanding -= 1
        if not self._pool.has_one:
            self._pool.note(self._member, outcome, why)

    def end(self, error: BaseException | None) -> None:
        """Give it back; the error, or that there was none, tells how it did."""
        if error is None:
            self.give_back(Outcome.ANSWERED)
        else:
            self.give_back(_outcome_of(error), str(error))

    def __enter__(self) -> UpstreamEndpoint:
        """Take the endpoint."""
        return self.take()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        self.end(error)


def _outcome_of(error: BaseException) -> Outcome:
    """Tell what an error says of the endpoint."""
    of_server = isinstance(error, GatewayError) and error.kind.value.of_server
    return Outcome.FAILED if of_server else Outcome.UNKNOWN
