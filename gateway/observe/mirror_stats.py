"""Counts mirrored requests and logs their failures, in one line a minute at most."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable

from gateway.errors import escape_for_log
from gateway.observe.call_record import CallRecord
from gateway.observe.gateway_metrics import MirrorMetrics

LOG_INTERVAL = 60.0
"""Seconds between two lines."""
_CLIENT_ERRORS = range(400, 500)

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
        self._counts = Counter[str]()
        """The requests since the last line, by what became of them."""
        self._last_failure = ""
        self._quiet_until = -math.inf

    def count_sent(self, failure: str, status: int = 0) -> None:
        """Count a request that was sent; ``failure`` tells why it failed, if it did.

        With a ``status`` of 4xx the server works, and has rejected the request.
        """
        if not failure:
            self._count("ok")
        elif status in _CLIENT_ERRORS:
            self._count("rejected", "was rejected", failure)
        else:
            self._count("failed", "failed", failure)

    def observe(self, record: CallRecord) -> None:
        """Count what a request that was sent says of its endpoints."""
        if self._metrics is not None:
            self._metrics.observe(record)

    def count_skipped(self, why: str) -> None:
        """Count a request that was not sent."""
        self._count("skipped", "was not sent", why)

    def _count(self, result: str, what: str = "", why: str = "") -> None:
        self._counts[result] += 1
        if self._metrics is not None:
            self._metrics.results[result].add(1.0)
        if what:
            self._last_failure = why = escape_for_log(why)
            _log.debug("a request to the mirror '%s' %s: %s", self._name, what, why)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Log the failures since the last line, if that is a minute old.

        Call it once a second: the next request, which does the same, may never come.
        """
        if self._clock() >= self._quiet_until:
            self.flush()

    def flush(self) -> None:
        """Log the failures since the last line, if there are any."""
        counts = self._counts
        if counts.total() == counts["ok"]:
            return
        self._quiet_until = self._clock() + LOG_INTERVAL
        rejected = f", {counts['rejected']} were rejected with 4xx" if counts["rejected"] else ""
        skipped = f", {counts['skipped']} were not sent" if counts["skipped"] else ""
        _log.warning(
            "mirror to '%s': %d of %d requests failed%s%s, last: %s",
            self._name,
            counts["failed"],
            counts.total() - counts["skipped"],
            rejected,
            skipped,
            self._last_failure,
        )
        counts.clear()
