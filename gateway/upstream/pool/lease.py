"""Endpoints lent to exchanges, and what those tell of them."""

from __future__ import annotations

from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from gateway.errors import ErrorKind, GatewayError
from gateway.upstream.metadata_cache import ServerRefusalError
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.model_discovery import may_have
from gateway.upstream.transport import UpstreamEndpoint

if TYPE_CHECKING:
    from gateway.upstream.pool.outlier_detection import Ejections


_SERVER_ERROR = 500
"""The first status of a failed call, whatever it says of the endpoint."""


class Outcome(Enum):
    """What an exchange tells of its endpoint."""

    ANSWERED = "answered"
    FAILED = "failed"
    UNCONNECTED = "unconnected"
    """It failed, as there was no connection."""
    UNKNOWN = "unknown"


class Accounts(Protocol):
    """Who lends endpoints, and keeps account of them."""

    turn: int
    has_one: bool
    ejections: Ejections

    @property
    def differs(self) -> bool:
        """Tell whether its endpoints may have different models."""


class Loan:
    """An endpoint lent, while its context is open, or until it is given back."""

    def __init__(self, pool: Accounts, member: Member, is_trial: bool = True) -> None:
        self._pool = pool
        self._member = member
        self._is_trial = is_trial
        self._server_error = 0
        self.endpoint = member.endpoint

    def take(self) -> UpstreamEndpoint:
        """Count the exchange, and give the endpoint."""
        pool, member = self._pool, self._member
        member.outstanding += 1
        pool.turn += 1
        if self._is_trial and member.health.ejections:
            pool.ejections.try_out(member)
        return self.endpoint

    async def may_have(self, model: str) -> bool:
        """Tell whether the endpoint has a model now: it is asked, if endpoints may differ."""
        return not self._pool.differs or await may_have(self.endpoint, model)

    def give_back(self, outcome: Outcome, why: str = "") -> None:
        """Count the exchange no more; ``why`` tells of a failure."""
        member, pool = self._member, self._pool
        member.outstanding -= 1
        # Of a good response of one that is alone there is nothing to note.
        if (
            outcome is not Outcome.ANSWERED
            or self._server_error
            or not pool.has_one
            or member.calls.failures
        ):
            pool.ejections.note(member, outcome, why, self._server_error)

    def judge(self, status: int) -> tuple[Outcome, str]:
        """Tell what the status of an answer says of the endpoint, and why that failed.

        A status of 5xx counts as a failed call, whatever is told.
        """
        if status >= _SERVER_ERROR:
            self._server_error = status
        return self._pool.ejections.judge(status)

    def retried(self, status: int) -> tuple[Outcome, str]:
        """Tell what a status says for which another endpoint is asked: that this one failed."""
        self.judge(status)
        return Outcome.FAILED, f"it answered {status}"

    def end(self, error: BaseException | None) -> None:
        """Give it back; the error, or that there was none, tells how it did."""
        if isinstance(error, ServerRefusalError):
            self.judge(error.status)
        self.give_back(*told_by(error))

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


def told_by(error: BaseException | None) -> tuple[Outcome, str]:
    """Tell what an error, or that there was none, says of the endpoint, and why that failed."""
    if error is None:
        return Outcome.ANSWERED, ""
    if not isinstance(error, GatewayError) or not error.kind.value.of_server:
        return Outcome.UNKNOWN, str(error)
    unconnected = error.kind is ErrorKind.UNREACHABLE
    return (Outcome.UNCONNECTED if unconnected else Outcome.FAILED), str(error)
