"""Counts mirrored requests and logs their failures, in one line a minute at most."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from gateway.errors import escape_for_log
from gateway.observe.call_record import CallRecord
from gateway.observe.gateway_metrics import MirrorMetrics

LOG_INTERVAL = 60.0
"""Seconds between two lines."""
_CLIENT_ERROR = 4
"""The first digit of the status."""

_log = logging.getLogger("tensorgate.mirror")


class MirrorStats:
    """Counts the requests to the upstream ``name``; ``clock`` returns seconds.

    The first failure is logged at once. ``flush_if_due`` logs later ones a minute after it.
    """

    def __init__(
        self, name: str, clock: Callable[[], float], metrics: MirrorMetrics | None = None
    ) -> None:
        self._name = name
        self._metrics = metrics
        self._clock = clock
        self._sent = self._failed = self._rejected = self._skipped = 0
        self._last_failure = ""
        self._quiet_until = -math.inf

    def count_sent(self, failure: str, status: int = 0) -> None:
        """Count a request that was sent; ``failure`` tells why it failed, if it did.

        With a ``status`` of 4xx the server works, and has rejected the request.
        """
        self._sent += 1
        metrics = self._metrics
        is_rejected = bool(failure) and status // 100 == _CLIENT_ERROR
        if failure:
            self._rejected += is_rejected
            self._failed += not is_rejected
            self._note("was rejected" if is_rejected else "failed", failure)
        if metrics is not None:
            counter = metrics.rejected if is_rejected else metrics.failed
            (counter if failure else metrics.ok).add(1.0)
        self.flush_if_due()

    def observe(self, record: CallRecord) -> None:
        """Count what a request that was sent says of its endpoints."""
        if self._metrics is not None:
            self._metrics.observe(record)

    def count_skipped(self, why: str) -> None:
        """Count a request that was not sent."""
        self._skipped += 1
        if self._metrics is not None:
            self._metrics.skipped.add(1.0)
        self._note("was not sent", why)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Log the failures since the last line, if that is a minute old.

        Call it once a second: the next request, which does the same, may never come.
        """
        if self._has_failures and (now := self._clock()) >= self._quiet_until:
            self._quiet_until = now + LOG_INTERVAL
            self.flush()

    def flush(self) -> None:
        """Log the failures since the last line, if there are any."""
        if not self._has_failures:
            return
        rejected = f", {self._rejected} were rejected with 4xx" if self._rejected else ""
        skipped = f", {self._skipped} were not sent" if self._skipped else ""
        _log.warning(
            "mirror to '%s': %d of %d requests failed%s%s, last: %s",
            self._name,
            self._failed,
            self._sent,
            rejected,
            skipped,
            self._last_failure,
        )
        self._sent = self._failed = self._rejected = self._skipped = 0

    @property
    def _has_failures(self) -> bool:
        return bool(self._failed or self._rejected or self._skipped)

    def _note(self, what: str, why: str) -> None:
        self._last_failure = escape_for_log(why)
        _log.debug("a request to the mirror '%s' %s: %s", self._name, what, self._last_failure)
