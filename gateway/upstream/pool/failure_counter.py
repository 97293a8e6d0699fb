"""Counts the failed calls of an endpoint, whatever ejection makes of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

_SHOWN = 300
"""Characters that are stored of an error."""


@dataclass(slots=True)
class FailureCounter:
    """Counts failed calls and stores the last error of an endpoint.

    A call fails where there is no whole response, or one of 5xx. Errors are stored as text: an
    exception's traceback would hold the frames that it passed, and with them request bodies.
    """

    failures: int = 0
    """In a row."""
    connect_failures: int = 0
    """In a row: calls for which there was no connection."""
    failures_total: int = 0
    responses_5xx: int = 0
    last_error: str | None = None
    last_error_time: float = 0.0
    """In seconds since 1970."""
    next_logged: float = float("-inf")
    """When a response of 5xx is logged again, in seconds of the pool's clock."""

    def failed(self, why: str, is_5xx: bool, is_unconnected: bool) -> None:
        """Count a failed call, and why it failed."""
        self.failures += 1
        self.failures_total += 1
        self.responses_5xx += is_5xx
        self.connect_failures = self.connect_failures + 1 if is_unconnected else 0
        self.last_error = why[:_SHOWN]
        self.last_error_time = time.time()

    def succeeded(self) -> None:
        """Note a good response."""
        self.failures = self.connect_failures = 0
