"""Logs why calls failed and connections were refused, at a limited rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gateway.errors import ErrorKind, GatewayError, escape_for_log
from gateway.observe.call_record import CallRecord

_WINDOW = 10.0
"""Seconds in which the same cause is logged once."""
_MAX_CAUSES = 20
"""Different causes that are logged in that time."""
_FIRST_SERVER_ERROR, _NOT_IMPLEMENTED = 500, 501
_DEADLINE_EXCEEDED = 4
"""The status of gRPC."""

# The gateway's own 502, 503 and 504. NOT_READY answers a health check, so no call failed.
_FAILURES = frozenset(
    (
        ErrorKind.BAD_RESPONSE,
        ErrorKind.NOT_ONE_MESSAGE,
        ErrorKind.NO_RESPONSE,
        ErrorKind.OVERLOADED,
        ErrorKind.EXHAUSTED,
        ErrorKind.REFUSED,
        ErrorKind.UNREACHABLE,
        ErrorKind.SERVER_TIMEOUT,
    )
)

_log = logging.getLogger("tensorgate")


class LimitedLog:
    """Logs warnings: one of each cause in ten seconds, and a limited number of causes.

    It counts the others, of which ``flush_if_due`` and ``flush`` write a line. ``what`` says in the
    plural what a message is about. ``clock`` returns seconds.
    """

    def __init__(
        self, what: str, clock: Callable[[], float] = time.monotonic, log: logging.Logger = _log
    ) -> None:
        self._what = what
        self._clock = clock
        self._log = log
        self._window_end = float("-inf")
        self._logged: set[str] = set()
        self._suppressed = 0

    def warn(self, prefix: str, message: str, cause: str = "") -> None:
        """Log a message, unless another one of the same cause was logged.

        The cause is the message, or ``cause`` if messages differ by numbers. The prefix, such as
        the address of a client, makes it no other cause.
        """
        cause = cause or message
        now = self._clock()
        if now >= self._window_end:
            self.flush()
            self._logged.clear()
            self._window_end = now + _WINDOW
        if cause in self._logged or len(self._logged) >= _MAX_CAUSES:
            self._suppressed += 1
            return
        self._logged.add(cause)
        self._log.warning("%s: %s", prefix, escape_for_log(message))

    def flush_if_due(self) -> None:
        """Log how many messages were not logged, once the ten seconds are over.

        Call it once a second: the next message, which does the same, may never come.
        """
        if self._suppressed and self._clock() >= self._window_end:
            self.flush()

    def flush(self) -> None:
        """Log how many messages were not logged until now."""
        if self._suppressed:
            self._log.warning("%d more %s within %g s", self._suppressed, self._what, _WINDOW)
            self._suppressed = 0


class FailureLog(LimitedLog):
    """Logs why calls failed, at a limited rate; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("calls failed", clock)

    def write(self, error: GatewayError, request_id: str = "", status: int = 0) -> None:
        """Log a failed call, if its upstream or a limit of the gateway is the reason.

        ``status`` is that of the access log; 0 is the one that the error has over HTTP.
        """
        if error.kind in _FAILURES:
            status = status or error.kind.value.status
            self.warn(_prefix(request_id, status), error.message, error.cause)

    def observe(self, record: CallRecord) -> None:
        """Log a call that has ended with a server's response of 5xx, in the server's words.

        Not if its client asked for what the server does not have, or if its own deadline has ended.
        """
        if record.status < _FIRST_SERVER_ERROR or record.error or not record.server_error:
            return
        if record.status != _NOT_IMPLEMENTED and record.grpc_status != _DEADLINE_EXCEEDED:
            message = f"{record.endpoint or record.upstream} returned {record.server_error}"
            self.warn(_prefix(record.request_id, record.status), message)


def _prefix(request_id: str, status: int) -> str:
    return f"request {request_id or '-'} failed with {status}"


FAILURE_LOG = FailureLog()
"""The failure log of this process."""

REFUSAL_LOG = LimitedLog("connections or requests of clients were refused")
"""Why this process refused connections and requests that were no valid HTTP, or beyond a limit.

What one client does wrong again and again must not hide the failures of others' calls.
"""
