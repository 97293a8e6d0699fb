"""How the metrics of all workers changed: the last hour, and the rates of the last seconds."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.observe.call_metrics import (
    CALL_LATENCY,
    DURATION,
    ENDPOINT_LATENCY,
    RECEIVED_BYTES,
    REQUEST_BYTES,
    RESPONSE_BYTES,
    RESPONSES,
    SENT_BYTES,
    SERVER_DURATION,
)
from gateway.observe.gateway_metrics import ENDPOINT_FAILURES, MIRROR_REQUESTS
from gateway.observe.metric_store import Family, HistogramFamily, MetricStore
from gateway.observe.metric_table import MetricTable, Words, quantiles

INTERVAL = 1.0
"""Seconds between two samples."""
_MAX_CPU_SHARE = 0.02
"""With many series, samples are taken less often: they take at most this share of a core."""
WINDOW = 10.0
"""Seconds over which rates and percentiles of now are taken."""
MINUTE = 60.0
"""Seconds over which the percentiles of endpoints and models are taken."""
_MINUTE_STEP = 10.0
RECENT_POINTS, HOUR_POINTS, HOUR_STEP = 300, 360, 10
"""Points of a second, and points of ten seconds."""
ENDPOINT_POINTS = 30
"""Points of ten seconds that are kept of each endpoint."""

FAMILIES: tuple[Family, ...] = (
    DURATION,
    REQUEST_BYTES,
    RESPONSE_BYTES,
    SERVER_DURATION,
    SENT_BYTES,
    RECEIVED_BYTES,
    RESPONSES,
    ENDPOINT_FAILURES,
    CALL_LATENCY,
    ENDPOINT_LATENCY,
    MIRROR_REQUESTS,
)
ERROR_STATUSES = ("5xx", "aborted")
"""The statuses of calls that count as errors."""
_STATUS = DURATION.labels.index("status")
_SHARES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
_FIELDS = ("calls_per_second", "errors_per_second", *_SHARES, "requests_in_progress")

Row = NDArray[np.float32]

_log = logging.getLogger("tensorgate.admin")


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    """On the clock of ``time.monotonic``."""
    tables: dict[Family, Words]


class Window:
    """What changed between two samples, ``seconds`` apart."""

    def __init__(self, labels: dict[Family, list[tuple[str, ...]]], old: _Sample, new: _Sample):
        self.seconds = max(new.at - old.at, 1e-9)
        self._labels = labels
        self._old = old
        self._new = new

    def labels(self, family: Family) -> Sequence[tuple[str, ...]]:
        """Return the label values of each row."""
        return self._labels[family]

    def change(self, family: Family) -> Words:
        """Return how the words of each series have changed."""
        new = self._new.tables[family]
        old = self._old.tables[family]
        change = new.copy()
        change[: len(old)] -= old
        return change

    def calls(self) -> Words:
        """Return the calls per second of each series of DURATION."""
        rates: Words = self.change(DURATION)[:, 1:].sum(axis=1) / self.seconds
        return rates


class _Points:
    """The newest points of a series of times, oldest first; NaN where nothing was measured."""

    def __init__(self, count: int, step: float) -> None:
        self._points: deque[Row] = deque(maxlen=count)
        self._step = step
        self._end = 0.0

    def append(self, point: Row, now: float) -> None:
        """Append a point; if some were left out, there is a gap.

        Points that come a little late each time are a whole step late at last: that is a gap too.
        """
        steps = round((now - self._end) / self._step) if self._end else 0
        for _ in range(min(steps - 1, self._points.maxlen or 0)):
            self._points.append(np.full(len(_FIELDS), np.nan, np.float32))
        self._points.append(point)
        # The clock may have been set back.
        self._end = self._end + steps * self._step if steps > 0 else now

    def document(self) -> dict[str, Any]:
        """Return the points by field."""
        columns = np.array(self._points).T if self._points else np.empty((len(_FIELDS), 0))
        fields = zip(_FIELDS, columns, strict=True)
        return {"end": round(self._end, 3), "step_seconds": self._step} | {
            name: [rounded(value) for value in column.tolist()] for name, column in fields
        }


class History:
    """Samples the metrics once a second while its task runs; memory is bounded.

    ``in_progress`` returns the calls in progress.
    """

    def __init__(self, store: MetricStore, in_progress: Callable[[], float]) -> None:
        self._tables = {family: MetricTable(store, family) for family in FAMILIES}
        self._in_progress = in_progress
        self._samples: deque[_Sample] = deque()
        self._minute: deque[_Sample] = deque()
        """Samples of the last minute, ten seconds apart."""
        self._recent = _Points(RECENT_POINTS, 1)
        self._hour = _Points(HOUR_POINTS, HOUR_STEP)
        self._next_hour_point = 0.0
        self._endpoints: deque[tuple[Row, Row]] = deque(maxlen=ENDPOINT_POINTS)
        """Calls per second and 99th percentile in ms of each row of SERVER_DURATION."""
        self.interval = INTERVAL

    async def run(self) -> None:
        """Sample until cancelled."""
        due = time.monotonic()
        while True:
            try:
                took = await asyncio.to_thread(self._sample_now)
                self.interval = max(INTERVAL, math.ceil(took / _MAX_CPU_SHARE))
            except Exception:
                # An error of our own is logged, and must not end the task.
                _log.exception("the metrics could not be sampled")
            due = max(due + self.interval, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def _sample_now(self) -> float:
        """Take a sample; return the seconds of a core that it took, on a busy machine too."""
        began = time.thread_time()
        self.sample(time.monotonic(), time.time())
        return time.thread_time() - began

    def sample(self, at: float, now: float) -> None:
        """Take a sample; ``at`` is on the clock of ``time.monotonic``, ``now`` the Unix time."""
        tables = {family: table.read() for family, table in self._tables.items()}
        sample = _Sample(at, tables)
        if self._samples:
            self._recent.append(self._point(self._window(self._samples[-1], sample)), now)
        samples = self._samples
        samples.append(sample)
        while len(samples) > 2 and samples[1].at <= at - WINDOW:
            samples.popleft()
        minute = self._minute
        if not minute or at >= minute[-1].at + _MINUTE_STEP - INTERVAL / 2:
            minute.append(sample)
        while len(minute) > 1 and minute[1].at <= at - MINUTE:
            minute.popleft()
        if len(samples) > 1 and at >= self._next_hour_point:
            self._next_hour_point = at + HOUR_STEP - INTERVAL / 2
            window = self._window(samples[0], sample)
            self._hour.append(self._point(window), now)
            calls = window.change(SERVER_DURATION)[:, 1:].sum(axis=1) / window.seconds
            latencies = endpoint_latencies(window)
            p99 = np.full(len(calls), np.nan)
            for row, labels in enumerate(window.labels(SERVER_DURATION)[: len(calls)]):
                if calls[row] and labels in latencies:
                    found = percentile_ms(ENDPOINT_LATENCY, latencies[labels], 0.99)
                    p99[row] = math.nan if found is None else found
            self._endpoints.append((calls.astype(np.float32), p99.astype(np.float32)))

    @property
    def now(self) -> Window | None:
        """Return what changed in the last seconds; None before the second sample."""
        samples = self._samples
        return self._window(samples[0], samples[-1]) if len(samples) > 1 else None

    @property
    def minute(self) -> Window | None:
        """Return what changed in the last minute; None before the second sample."""
        if len(self._samples) < 2:
            return None
        return self._window(self._minute[0], self._samples[-1])

    def recent(self) -> dict[str, Any]:
        """Return the last five minutes in steps of a second."""
        return self._recent.document()

    def hour(self) -> dict[str, Any]:
        """Return the last hour in steps of ten seconds."""
        return self._hour.document()

    def endpoint(self, row: int) -> dict[str, Any]:
        """Return the last five minutes of an endpoint: of a row of SERVER_DURATION."""
        points = [(calls[row], p99[row]) for calls, p99 in self._endpoints if row < len(calls)]
        return {
            "step_seconds": HOUR_STEP,
            "calls_per_second": [rounded(float(calls)) for calls, _ in points],
            "p99_ms": [rounded(float(p99)) for _, p99 in points],
        }

    def _window(self, old: _Sample, new: _Sample) -> Window:
        labels = {family: table.labels for family, table in self._tables.items()}
        return Window(labels, old, new)

    def _point(self, window: Window) -> Row:
        summary = summarize(window)
        values = [summary[name] for name in _FIELDS[:-1]]
        point = [math.nan if value is None else value for value in (*values, self._in_progress())]
        return np.array(point, np.float32)


def summarize(window: Window, rows: Sequence[int] | None = None) -> dict[str, float | None]:
    """Return rates and error ratio of rows of DURATION; of all calls also the percentiles."""
    words, labels = window.change(DURATION), window.labels(DURATION)
    chosen = range(len(words)) if rows is None else rows
    calls = words[:, 1:].sum(axis=1)
    total = sum(calls[row] for row in chosen)
    errors = sum(calls[row] for row in chosen if labels[row][_STATUS] in ERROR_STATUSES)
    summary = {
        "calls_per_second": rounded(total / window.seconds),
        "errors_per_second": rounded(errors / window.seconds),
        "error_ratio": rounded(errors / total) if total else None,
    }
    return summary if rows is not None else summary | call_percentiles(window)


def call_percentiles(window: Window, model: str | None = None) -> dict[str, float | None]:
    """Return the percentiles of all calls, or of those of a model."""
    words = window.change(CALL_LATENCY)
    if model is not None:
        labels = window.labels(CALL_LATENCY)[: len(words)]
        words = words[[row for row, (name,) in enumerate(labels) if name == model]]
    merged = words.sum(axis=0)
    return {name: percentile_ms(CALL_LATENCY, merged, share) for name, share in _SHARES.items()}


def endpoint_latencies(window: Window) -> dict[tuple[str, str], Words]:
    """Return the words of ENDPOINT_LATENCY of each endpoint, summed over its models."""
    words = window.change(ENDPOINT_LATENCY)
    found: dict[tuple[str, str], Words] = {}
    for (upstream, url, _), row in zip(window.labels(ENDPOINT_LATENCY), words, strict=False):
        before = found.get((upstream, url))
        found[upstream, url] = row if before is None else before + row
    return found


def percentile_ms(family: HistogramFamily, words: Words, share: float) -> float | None:
    """Return the time in ms below which a share of one histogram's values lies, exact to 5 %."""
    return rounded(1000 * float(quantiles(family, words[None], share)[0]))


def rounded(value: float) -> float | None:
    """Return a number with some four significant digits; None for one that is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
