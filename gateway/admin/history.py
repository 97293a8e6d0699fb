"""How the metrics of all workers changed: the last hour, and the rates of the last seconds."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gateway.observe import families
from gateway.observe.metric_store import Family, HistogramFamily, MetricStore, clean_label
from gateway.observe.metric_table import Histograms, MetricTable, RecentHistograms, Words, quantiles
from gateway.upstream.pool.member import Outcome

INTERVAL = 1.0
"""Seconds between two samples."""
_MAX_CPU_SHARE = 0.02
"""With many series, samples are taken less often: they take at most this share of a core."""
WINDOW = 10.0
"""Seconds over which rates of now are taken."""
MINUTE = 60.0
"""Seconds over which all percentiles are taken, those of each point of a curve too."""
RECENT_POINTS, HOUR_POINTS, HOUR_STEP = 300, 360, 10
"""Points of a second, and points of ten seconds."""
ENDPOINT_POINTS = 30
"""Points of ten seconds that the topology shows of each endpoint and route."""
MAX_CURVES = 500
"""Endpoints, and routes, of which a point is kept: the busiest ones of each ten seconds. So the
last hour of all endpoints takes 3 MB at most, and that of all routes too."""

RATE_FAMILIES: tuple[Family, ...] = (
    families.DURATION,
    families.REQUEST_BYTES,
    families.RESPONSE_BYTES,
    families.SERVER_DURATION,
    families.SENT_BYTES,
    families.RECEIVED_BYTES,
    families.RESPONSES,
    families.ENDPOINT_FAILURES,
    families.MIRROR_REQUESTS,
    families.REFUSALS,
    families.DROPPED_LOG_LINES,
)
"""The families whose rates are shown."""
LATENCY_FAMILIES = (families.CALL_LATENCY, families.ROUTE_LATENCY, families.ENDPOINT_LATENCY)
"""The histograms of all percentiles. They are large, so only their changes are kept."""
ERROR_STATUSES = ("5xx", "aborted", "failed")
"""The statuses of calls, and the results of mirrored copies, that count as errors."""
UNSENT = Outcome.UNREACHABLE.value
"""The kind of failures of calls that were not sent to their endpoint."""
CLIENT_ERROR_STATUSES = ("4xx", "rejected")
"""Those of calls and copies that failed by their clients' fault, which count apart."""
ROUTE, MODEL, UPSTREAM, FORM, STATUS = map(
    families.DURATION.labels.index, ("route", "model", "upstream", "form", "status")
)
"""Where the labels of a series of DURATION are."""
_SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_RATES = ("calls_per_second", "errors_per_second", "client_errors_per_second")
_FIELDS = (*_RATES, "p50_ms", "p95_ms", "p99_ms", "requests_in_progress")
_CURVE_FIELDS = ("calls_per_second", "errors_per_second", "p99_ms")

Row = NDArray[np.float32]
Key = tuple[str, ...]
"""The labels of an endpoint, a route or a model."""
Rate = tuple[Key, float]
"""The labels of a series, and its change per second."""
Minute = Mapping[Family, Histograms]
"""What LATENCY_FAMILIES have counted in the last minute."""
Values = Mapping[Key, Sequence[float]]
"""The values of ``_CURVE_FIELDS`` of each endpoint, or route, with calls or errors."""

_log = logging.getLogger("tensorgate.admin")


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    """On the clock of ``time.monotonic``."""
    tables: dict[Family, Words]


@dataclass(frozen=True, slots=True)
class Window:
    """What changed between two samples, ``seconds`` apart."""

    seconds: float
    labels: Mapping[Family, Sequence[Key]]
    """The label values of each row."""
    _old: Mapping[Family, Words]
    _new: Mapping[Family, Words]

    def change(self, family: Family) -> Words:
        """Return how the words of each series have changed."""
        old, change = self._old[family], self._new[family].copy()
        change[: len(old)] -= old
        return change


def rates_of(window: Window | None, family: Family) -> list[Rate]:
    """Return the rate per second of each series of a family; of a histogram, that of its values.

    Those that did not change are left out.
    """
    if window is None:
        return []
    change = window.change(family)
    sums = change[:, 1:].sum(axis=1) if isinstance(family, HistogramFamily) else change[:, 0]
    rates = zip(window.labels[family], (sums / window.seconds).tolist(), strict=False)
    return [(labels, rate) for labels, rate in rates if rate]


class Percentiles:
    """Finds percentiles of a family of latencies, over all workers: of each group of its series.

    ``group`` returns the group of a series' labels; without it, all series are the group ``()``.
    Histograms are summed up, and so exact to ``PRECISION``. ``minute`` is the last minute, of which
    all percentiles are, or the time since the start if that is less; None if nothing is known yet.
    """

    def __init__(
        self,
        minute: Minute | None,
        family: HistogramFamily,
        group: Callable[[Key], Key] = lambda _: (),
    ) -> None:
        self.seconds = None if minute is None else round(minute[family].seconds)
        """Of how many seconds they are."""
        self.found: dict[Key, dict[str, float | None]] = {}
        """``p50``, ``p90``, ``p95`` and ``p99`` in ms of each group that has values."""
        if minute is None:
            return
        rows: dict[Key, int] = {}
        labels = minute[family].labels
        numbers = [rows.setdefault(group(each), len(rows)) for each in labels]
        sums = np.zeros((len(rows), family.words))
        np.add.at(sums, np.array(numbers, np.int64), minute[family].words)
        columns = [(1000 * quantiles(family, sums, share)).tolist() for share in _SHARES.values()]
        for key, *values in zip(rows, *columns, strict=True):
            if math.isfinite(values[0]):
                self.found[key] = dict(zip(_SHARES, map(rounded, values), strict=True))

    def describe(self, group: Key = ()) -> dict[str, float | None]:
        """Return ``p50_ms`` and so on of a group, and of how many seconds they are."""
        found = self.found.get(group, {})
        return {
            **{f"{name}_ms": found.get(name) for name in _SHARES},
            "duration_window_seconds": self.seconds,
        }


_Point = TypeVar("_Point")


class _Points(Generic[_Point]):
    """The newest points of a series of times, oldest first; None where nothing was measured."""

    def __init__(self, count: int, step: float) -> None:
        self._points: deque[_Point | None] = deque(maxlen=count)
        self._step = step
        self._end = 0.0

    def append(self, point: _Point, now: float) -> None:
        """Append a point; if some were left out, there is a gap.

        Points that come a little late each time are a whole step late at last: that is a gap too.
        """
        steps = round((now - self._end) / self._step) if self._end else 0
        for _ in range(min(steps - 1, self._points.maxlen or 0)):
            self._points.append(None)
        self._points.append(point)
        # The clock may have been set back.
        self._end = self._end + steps * self._step if steps > 0 else now

    def document(
        self, names: Sequence[str], read: Callable[[_Point], Sequence[float]], last: int
    ) -> dict[str, Any]:
        """Return the last points by the names of the values that ``read`` returns of each."""
        empty = [math.nan] * len(names)
        points = list(self._points)[-last:]
        rows = [empty if point is None else read(point) for point in points]
        return {"end": round(self._end, 3), "step_seconds": self._step} | {
            name: [rounded(float(row[column])) for row in rows] for column, name in enumerate(names)
        }


_NOTHING = (0.0, 0.0, math.nan)
"""The values of a step without calls."""


class _Curves:
    """The last hour of many endpoints, or routes; of each step, that of the busiest ones."""

    def __init__(self) -> None:
        self._points = _Points[tuple[NDArray[np.int32], Row]](HOUR_POINTS, HOUR_STEP)
        self._numbers: dict[Key, int] = {}

    def append(self, values: Values, now: float) -> None:
        """Append a point."""
        busiest = sorted(values, key=lambda key: -sum(values[key][:2]))[:MAX_CURVES]
        for key in busiest:
            self._numbers.setdefault(key, len(self._numbers))
        busiest.sort(key=self._numbers.__getitem__)
        numbers = np.array([self._numbers[key] for key in busiest], np.int32)
        rows = np.array([values[key] for key in busiest], np.float32)
        self._points.append((numbers, rows), now)

    def document(self, key: Key, last: int) -> dict[str, Any]:
        """Return the last points of one."""
        number = self._numbers.get(key, -1)

        def read(point: tuple[NDArray[np.int32], Row]) -> Sequence[float]:
            numbers, rows = point
            at = int(numbers.searchsorted(number))
            found = at < len(numbers) and numbers[at] == number
            return rows[at].tolist() if found else _NOTHING

        return self._points.document(_CURVE_FIELDS, read, last)


class History:
    """Samples the metrics once a second while its task runs; memory is bounded.

    ``in_progress`` returns the calls in progress.
    """

    def __init__(self, store: MetricStore, in_progress: Callable[[], float]) -> None:
        self._tables = {family: MetricTable(store, family) for family in RATE_FAMILIES}
        self._latencies = {each: RecentHistograms(store, each) for each in LATENCY_FAMILIES}
        self.minute: Minute | None = None
        """What changed in the last minute; None before the second sample."""
        self._in_progress = in_progress
        self._samples: deque[_Sample] = deque()
        self._recent = _Points[Row](RECENT_POINTS, 1)
        self._hour = _Points[Row](HOUR_POINTS, HOUR_STEP)
        self._next_hour_point = 0.0
        self._endpoints, self._routes = _Curves(), _Curves()
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
        sample = _Sample(at, {family: table.read() for family, table in self._tables.items()})
        for latencies in self._latencies.values():
            latencies.look(at)
        if self._samples:
            self.minute = {each: found.latest(MINUTE) for each, found in self._latencies.items()}
            self._recent.append(self._point(self._window(self._samples[-1], sample)), now)
        samples = self._samples
        samples.append(sample)
        while len(samples) > 2 and samples[1].at <= at - WINDOW:
            samples.popleft()
        if len(samples) > 1 and at >= self._next_hour_point:
            self._next_hour_point = at + HOUR_STEP - INTERVAL / 2
            window = self._window(samples[0], sample)
            self._hour.append(self._point(window), now)
            self._endpoints.append(_endpoint_values(window, self.minute), now)
            self._routes.append(_route_values(window, self.minute), now)

    @property
    def now(self) -> Window | None:
        """Return what changed in the last seconds; None before the second sample."""
        samples = self._samples
        return self._window(samples[0], samples[-1]) if len(samples) > 1 else None

    def recent(self) -> dict[str, Any]:
        """Return the last five minutes in steps of a second."""
        return self._recent.document(_FIELDS, np.ndarray.tolist, RECENT_POINTS)

    def hour(self) -> dict[str, Any]:
        """Return the last hour in steps of ten seconds."""
        return self._hour.document(_FIELDS, np.ndarray.tolist, HOUR_POINTS)

    def endpoint_curves(self, upstream: str, url: str, last: int = HOUR_POINTS) -> dict[str, Any]:
        """Return the last hour of an endpoint, or so many points of it."""
        return self._endpoints.document((clean_label(upstream), clean_label(url)), last)

    def route_curves(self, name: str, last: int = HOUR_POINTS) -> dict[str, Any]:
        """Return the last hour of a route, or so many points of it."""
        return self._routes.document((clean_label(name),), last)

    def _window(self, old: _Sample, new: _Sample) -> Window:
        labels = {family: table.labels for family, table in self._tables.items()}
        return Window(max(new.at - old.at, 1e-9), labels, old.tables, new.tables)

    def _point(self, window: Window) -> Row:
        percentiles = Percentiles(self.minute, families.CALL_LATENCY).describe()
        summary = summarize(rates_of(window, families.DURATION)) | percentiles
        values = [summary[name] for name in _FIELDS[:-1]]
        point = [math.nan if value is None else value for value in (*values, self._in_progress())]
        return np.array(point, np.float32)


def endpoint_calls(window: Window | None) -> dict[Key, float]:
    """Return the calls per second of each endpoint, with those that could not connect to it."""
    calls = defaultdict(float, rates_of(window, families.SERVER_DURATION))
    for (*endpoint, kind), rate in rates_of(window, families.ENDPOINT_FAILURES):
        if kind == UNSENT:
            calls[*endpoint,] += rate
    return calls


def _endpoint_values(window: Window, minute: Minute | None) -> Values:
    """Return the calls, the failures and the 99th percentile of each endpoint."""
    found: defaultdict[Key, list[float]] = defaultdict(lambda: [*_NOTHING])
    for key, rate in endpoint_calls(window).items():
        found[key][0] = rate
    for (*endpoint, _), rate in rates_of(window, families.ENDPOINT_FAILURES):
        found[*endpoint,][1] += rate
    return _with_p99(found, endpoint_percentiles(minute))


def _route_values(window: Window, minute: Minute | None) -> Values:
    """Return the calls, the errors and the 99th percentile of each route."""
    found: defaultdict[Key, list[float]] = defaultdict(lambda: [*_NOTHING])
    for labels, rate in rates_of(window, families.DURATION):
        values = found[labels[ROUTE],]
        values[0] += rate
        if labels[STATUS] in ERROR_STATUSES:
            values[1] += rate
    return _with_p99(found, route_percentiles(minute))


def _with_p99(found: defaultdict[Key, list[float]], percentiles: Percentiles) -> Values:
    for group, shares in percentiles.found.items():
        found[group][2] = shares["p99"] or math.nan
    return found


def route_percentiles(minute: Minute | None) -> Percentiles:
    """Return the percentiles of each route: of its label as a tuple."""
    return Percentiles(minute, families.ROUTE_LATENCY, lambda labels: labels)


def endpoint_percentiles(minute: Minute | None) -> Percentiles:
    """Return the percentiles of each endpoint, over all models: of its upstream and URL."""
    return Percentiles(minute, families.ENDPOINT_LATENCY, lambda labels: labels[:2])


def summarize(calls: Iterable[Rate]) -> dict[str, float | None]:
    """Return rates and error ratios of series whose last label tells what became of calls."""
    total = errors = refused = 0.0
    for labels, rate in calls:
        total += rate
        if labels[-1] in ERROR_STATUSES:
            errors += rate
        elif labels[-1] in CLIENT_ERROR_STATUSES:
            refused += rate
    return {
        "calls_per_second": rounded(total),
        "errors_per_second": rounded(errors),
        "error_ratio": rounded(errors / total) if total else None,
        "client_errors_per_second": rounded(refused),
        "client_error_ratio": rounded(refused / total) if total else None,
    }


def rounded(value: float) -> float | None:
    """Return a number with some four significant digits; None for one that is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
