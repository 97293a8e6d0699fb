"""Tells when the event loop of a worker lags: its calls wait for the CPU, not for servers."""

from __future__ import annotations

import logging
import time
from collections import deque
from statistics import median
from typing import Any

MEASUREMENTS = 20
"""So many of the newest measurements are looked at: those of five seconds, four a second."""
LAGS_FROM, WELL_BELOW = 0.1, 0.05
"""Seconds of lag from which an event loop is said to lag, and below which it is well again."""

_log = logging.getLogger("tensorgate")


class EventLoopWatch:
    """Says since when the event loop of this process lags, and what share of a core it gets.

    One long pause is no lag: the median of five seconds counts.
    """

    def __init__(self) -> None:
        self._measured: deque[tuple[float, float, float]] = deque(maxlen=MEASUREMENTS)
        """The lag of each, the time, and the CPU time of the process until then, in seconds."""
        self._since: float | None = None
        self._text = ""

    def observe(self, lag: float) -> None:
        """Note by how many seconds a timer was late; logs when that becomes too much, or ends."""
        self._measured.append((lag, time.monotonic(), time.process_time()))
        if len(self._measured) < MEASUREMENTS:
            return
        usual = median(each for each, _, _ in self._measured)
        if usual >= LAGS_FROM or (self._since is not None and usual >= WELL_BELOW):
            self._text = f"lags by {usual * 1000:.0f} ms and uses {self._cpu_share():.0%} of a core"
            if self._since is None:
                self._since = time.time()
                _log.warning("the event loop %s: all calls wait meanwhile", self._text)
        elif self._since is not None:
            self._since = None
            _log.info("the event loop lags no more")

    def describe(self) -> dict[str, Any] | None:
        """Return ``text`` and ``since``, a Unix time, while the event loop lags; else None."""
        return None if self._since is None else {"text": self._text, "since": self._since}

    def _cpu_share(self) -> float:
        (_, began, used), (_, end, used_at_end) = self._measured[0], self._measured[-1]
        return (used_at_end - used) / max(end - began, 1e-9)
