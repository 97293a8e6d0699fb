"""Logs why calls failed, at a limited rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gateway.errors import ErrorKind, GatewayError, escape_for_log

_WINDOW = 10.0
"""Seconds in which the same message is logged once."""
_MAX_MESSAGES = 20
"""Different messages that are logged in that time."""

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


class FailureLog:
    """Logs why calls failed: each message once in ten seconds, and a limited number of messages.

    ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window_end = float("-inf")
        self._logged: set[str] = set()
        self._suppressed = 0

    def write(self, error: GatewayError, request_id: str = "", status: int = 0) -> None:
        """Log a failed call, if its upstream or a limit of the gateway is the reason.

        ``status`` is that of the access log; 0 is the one that the error has over HTTP.
        """
        if error.kind not in _FAILURES:
            return
        now = self._clock()
        if now >= self._window_end:
            if self._suppressed:
                _log.warning("%d more calls failed within %g s", self._suppressed, _WINDOW)
            self._logged.clear()
            self._suppressed = 0
            self._window_end = now + _WINDOW
        if error.message in self._logged or len(self._logged) >= _MAX_MESSAGES:
            self._suppressed += 1
            return
        self._logged.add(error.message)
        status = status or error.kind.value.status
        message = escape_for_log(error.message)
        _log.warning("request %s failed with %d: %s", request_id or "-", status, message)


FAILURE_LOG = FailureLog()
"""The failure log of this process."""
