"""Why calls failed, in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gateway.errors import ErrorKind, GatewayError, escape_for_log

_WINDOW = 10.0
"""Seconds within which the same reason is logged once."""
_MOST = 20
"""Reasons that are logged in that time."""

# What the gateway itself answers with 502, 503 or 504; NOT_READY is a probe's, and no call failed.
_FAILURES = frozenset(
    (
        ErrorKind.BAD_RESPONSE,
        ErrorKind.NO_RESPONSE,
        ErrorKind.OVERLOADED,
        ErrorKind.EXHAUSTED,
        ErrorKind.UNREACHABLE,
        ErrorKind.SERVER_TIMEOUT,
    )
)

_log = logging.getLogger("tensorgate")


class FailureLog:
    """Logs why calls failed, each reason once in ten seconds, so that an outage is no flood.

    ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = float("-inf")
        self._logged: set[str] = set()
        self._more = 0

    def write(self, error: GatewayError, request_id: str = "") -> None:
        """Log why a call failed, if that was for a server, or for a lack of the gateway's own."""
        if error.kind not in _FAILURES:
            return
        now = self._clock()
        if now >= self._until:
            if self._more:
                _log.warning("%d more calls failed within %g s", self._more, _WINDOW)
            self._logged.clear()
            self._more = 0
            self._until = now + _WINDOW
        if error.message in self._logged or len(self._logged) >= _MOST:
            self._more += 1
            return
        self._logged.add(error.message)
        status, why = error.kind.value.status, escape_for_log(error.message)
        _log.warning("request %s failed with %d: %s", request_id or "-", status, why)


FAILURE_LOG = FailureLog()
"""Of this process."""
