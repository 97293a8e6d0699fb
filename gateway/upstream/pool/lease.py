"""Endpoints lent to exchanges, and what those tell of them."""

from __future__ import annotations

from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from gateway.errors import ErrorKind, GatewayError
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.model_discovery import may_have_model
from gateway.upstream.transport import UpstreamEndpoint

if TYPE_CHECKING:
    from gateway.upstream.pool.outlier_detection import OutlierDetector


_SERVER_ERROR = 500
"""The first status of a failed call, whatever it says of the endpoint."""


class Outcome(Enum):
    """What an exchange tells of its endpoint."""

    SUCCEEDED = "answered"
    FAILED = "failed"
    CONNECT_FAILED = "unconnected"
    """It failed, as there was no connection."""
    UNKNOWN = "unknown"


class LeaseOwner(Protocol):
    """Who lends endpoints, and keeps account of them."""

    leases_total: int
    has_single_endpoint: bool
    ejections: OutlierDetector

    @property
    def discovers_models(self) -> bool:
        """Tell whether its endpoints may have different models."""


class Lease:
    """An endpoint lent, while its context is open, or until it is given back."""

    def __init__(self, pool: LeaseOwner, member: Member, is_trial: bool = True) -> None:
        self._pool = pool
        self._member = member
        self._is_trial = is_trial
        self._server_error = 0
        self.endpoint = member.endpoint

    def acquire(self) -> UpstreamEndpoint:
        """Count the exchange, and give the endpoint."""
        pool, member = self._pool, self._member
        member.outstanding += 1
        pool.leases_total += 1
        if self._is_trial and member.health.ejections:
            pool.ejections.start_trial(member)
        return self.endpoint

    async def may_have_model(self, model: str) -> bool:
        """Tell whether the endpoint has a model now: it is asked, if endpoints may differ."""
        return not self._pool.discovers_models or await may_have_model(self.endpoint, model)

    def release(self, outcome: Outcome, why: str = "") -> None:
        """Count the exchange no more; ``why`` tells of a failure."""
        member, pool = self._member, self._pool
        member.outstanding -= 1
        # Of a good response of one that is alone there is nothing to note.
        if (
            outcome is not Outcome.SUCCEEDED
            or self._server_error
            or not pool.has_single_endpoint
            or member.calls.failures
        ):
            pool.ejections.note(member, outcome, why, self._server_error)

    def classify_status(self, status: int) -> tuple[Outcome, str]:
        """Tell what the status of an answer says of the endpoint, and why that failed.

        A status of 5xx counts as a failed call, whatever is told.
        """
        if status >= _SERVER_ERROR:
            self._server_error = status
        return self._pool.ejections.classify_status(status)

    def classify_retried(self, status: int) -> tuple[Outcome, str]:
        """Tell what a status says for which another endpoint is asked: that this one failed."""
        self.classify_status(status)
        return Outcome.FAILED, f"it answered {status}"

    def finish(self, error: BaseException | None) -> None:
        """Give it back; the error, or that there was none, tells how it did."""
        if isinstance(error, UpstreamResponseError):
            self.classify_status(error.status)
        self.release(*outcome_of(error))

    def __enter__(self) -> UpstreamEndpoint:
        """Take the endpoint."""
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        self.finish(error)


def outcome_of(error: BaseException | None) -> tuple[Outcome, str]:
    """Tell what an error, or that there was none, says of the endpoint, and why that failed."""
    if error is None:
        return Outcome.SUCCEEDED, ""
    if not isinstance(error, GatewayError) or not error.kind.value.upstream_failed:
        return Outcome.UNKNOWN, str(error)
    unconnected = error.kind is ErrorKind.UNREACHABLE
    return (Outcome.CONNECT_FAILED if unconnected else Outcome.FAILED), str(error)
