"""Leases of endpoints: a call holds one while it uses an endpoint, and reports its outcome."""

from __future__ import annotations

import logging
from typing import Protocol

from gateway.errors import ErrorKind, GatewayError, describe_error
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.pool.member import Member, Outcome
from gateway.upstream.pool.model_discovery import may_have_model
from gateway.upstream.pool.outlier_detection import OutlierDetector
from gateway.upstream.transport import UpstreamEndpoint

_FAILURES = {
    ErrorKind.UNREACHABLE: Outcome.UNREACHABLE,
    ErrorKind.SERVER_TIMEOUT: Outcome.TIMED_OUT,
    ErrorKind.NO_RESPONSE: Outcome.NO_RESPONSE,
    ErrorKind.BAD_RESPONSE: Outcome.BAD_RESPONSE,
    ErrorKind.NOT_ONE_MESSAGE: Outcome.BAD_RESPONSE,
}
"""What each error that is an upstream's failure says about the endpoint."""
_SERVER_ERROR, _NOT_IMPLEMENTED = 500, 501
"""The first status of a failed call; the policy decides whether the endpoint failed too.

With 501, and UNIMPLEMENTED of gRPC, the client has asked for something that the server never does.
"""

_log = logging.getLogger("tensorgate.upstream")


class LeaseOwner(Protocol):
    """The pool that grants leases."""

    leases_total: int
    has_single_endpoint: bool
    outlier_detector: OutlierDetector

    @property
    def discovers_models(self) -> bool:
        """Tell whether its endpoints may have different models."""


class Lease:
    """The right to use an endpoint for one call, and to report how that went.

    Call ``acquire``, and then ``release`` or ``finish``.
    """

    def __init__(self, pool: LeaseOwner, member: Member, is_trial: bool = True) -> None:
        self._pool = pool
        self._member = member
        self._is_trial = is_trial
        self._began_in_use = False
        self._server_error = 0
        self._server_said = ""
        self.endpoint = member.endpoint

    def acquire(self) -> UpstreamEndpoint:
        """Count the call as in flight and return the endpoint."""
        pool, member = self._pool, self._member
        self._began_in_use = not member.ejection.ejections
        if self._is_trial and not self._began_in_use:
            pool.outlier_detector.start_trial(member)
        pool.leases_total += 1
        member.outstanding += 1
        return self.endpoint

    async def may_have_model(self, model: str) -> bool:
        """Ask the endpoint whether a model is ready there, if endpoints may differ."""
        return not self._pool.discovers_models or await may_have_model(self.endpoint, model)

    def release(self, outcome: Outcome, why: str = "") -> None:
        """Report the outcome; ``why`` is the error of a failure."""
        member, pool = self._member, self._pool
        member.outstanding -= 1
        if outcome is Outcome.TIMED_OUT:
            self.endpoint.after_timeout()
        # The fast path: a success of the only endpoint changes nothing.
        if (
            outcome is not Outcome.SUCCEEDED
            or self._server_error
            or not pool.has_single_endpoint
            or member.calls.failures
        ):
            try:
                if not outcome.is_failure and self._server_error:
                    why = self._server_said
                pool.outlier_detector.record(
                    member, outcome, why, self._server_error, self._began_in_use
                )
            except Exception:
                # What else the call holds must be released, too.
                _log.exception("the outcome of a call at %s was not recorded", member.endpoint.url)

    def classify_status(self, status: int, error: str = "") -> tuple[Outcome, str]:
        """Return what a response's status says about the endpoint, and the error if it failed.

        The lease also counts any 5xx but 501 as a failed call. ``error`` is what the server says;
        see UpstreamResponse.
        """
        if status >= _SERVER_ERROR and status != _NOT_IMPLEMENTED:
            self._server_error = status
            self._server_said = f"it returned {error or status}"
        outcome, why = self._pool.outlier_detector.classify_status(status)
        return outcome, f"it returned {error}" if why and error else why

    def classify_retried(self, status: int, error: str = "") -> tuple[Outcome, str]:
        """Return a failure for a status that the call retries on another endpoint."""
        self.classify_status(status, error)
        return Outcome.FAILED, f"it returned {error or status}"

    def classify_error(self, error: BaseException | None) -> tuple[Outcome, str]:
        """Return what a call's error says about the endpoint, and its text; None is a success."""
        if isinstance(error, UpstreamResponseError):
            self.classify_status(error.status, describe_error(error.status, error.message))
        return outcome_of(error)

    def finish(self, error: BaseException | None) -> None:
        """Release the endpoint with the outcome that an error stands for; None is a success."""
        self.release(*self.classify_error(error))


def outcome_of(error: BaseException | None) -> tuple[Outcome, str]:
    """Return what a call's error says about the endpoint, and its text; None is a success."""
    if error is None:
        return Outcome.SUCCEEDED, ""
    if not isinstance(error, GatewayError) or not error.kind.value.upstream_failed:
        return Outcome.UNKNOWN, str(error)
    return _FAILURES[error.kind], str(error)
