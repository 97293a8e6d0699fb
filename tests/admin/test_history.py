"""The last hour of the metrics at times of the test's own; a latency is the same everywhere."""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gateway.admin import history as history_module
from gateway.admin.history import (
    HOUR_POINTS,
    MAX_CURVES,
    RATE_FAMILIES,
    RECENT_POINTS,
    History,
    Percentiles,
    Window,
    rates_of,
    rounded,
    route_percentiles,
    summarize,
)
from gateway.admin.panels.models import Savings, describe_model, describe_models
from gateway.admin.panels.overview import describe_overview
from gateway.admin.panels.topology import describe_topology, parse_choice
from gateway.observe import families
from gateway.observe.call_metrics import CallMetrics
from gateway.observe.call_record import CallLabels, CallRecord
from gateway.observe.metric_cells import PRECISION
from gateway.observe.metric_store import Family, MetricStore
from gateway.observe.metric_table import Words
from gateway.top import lists, overview
from tests.admin.site import URL, endpoint, make_settings, state_of, upstream, worker_status
from tests.support.gateway import until
from tests.top.documents import lines_of

NOW = 1_700_000_000.0


class _Sampled:
    """A history, and the store whose samples it takes."""

    def __init__(self) -> None:
        self.store = MetricStore(families.FAMILIES, 2)
        self.in_progress = 0.0
        self.history = History(self.store, lambda: self.in_progress)
        self.at = 0.0

    def call(
        self, seconds: float = 0.003, status: str = "2xx", times: int = 1, route: str = "r"
    ) -> None:
        labels = route, "infer", "m", "u", "json", status
        writer = self.store.writer(0)
        for _ in range(times):
            writer.histogram(families.DURATION, labels).observe(seconds)
            writer.histogram(families.CALL_LATENCY, ("m",)).observe(seconds)
            writer.histogram(families.ROUTE_LATENCY, (route,)).observe(seconds)

    def serve(self, url: str, seconds: float, times: int = 1) -> None:
        writer = self.store.writer(1)
        for _ in range(times):
            writer.histogram(families.SERVER_DURATION, ("u", url)).observe(seconds)
            writer.histogram(families.ENDPOINT_LATENCY, ("u", url, "m")).observe(seconds)

    def sample(self, after: float = 1.0) -> None:
        self.at += after
        self.history.sample(self.at, NOW + self.at)

    def recent(self) -> dict[str, Any]:
        return self.history.recent()


def test_rates_are_those_between_two_samples() -> None:
    sampled = _Sampled()
    sampled.call(times=1000)  # before the first sample: since when is not known
    sampled.sample()
    sampled.call(times=6)
    sampled.call(status="5xx", times=2)
    sampled.call(status="aborted", times=1)
    sampled.call(status="4xx", times=1)
    sampled.in_progress = 4
    sampled.sample(after=2)
    assert sampled.recent() == {
        "end": NOW + 3,
        "step_seconds": 1,
        "calls_per_second": [5],
        "errors_per_second": [1.5],
        "client_errors_per_second": [0.5],
        "p50_ms": [pytest.approx(3, rel=0.02)],
        "p95_ms": [pytest.approx(3, rel=0.02)],
        "p99_ms": [pytest.approx(3, rel=0.02)],
        "requests_in_progress": [4],
    }


def test_ratios_are_those_of_calls_and_not_known_without_any() -> None:
    sampled = _Sampled()
    for number, status in ((0, "2xx"), (6, "2xx"), (3, "4xx"), (1, "5xx")):
        sampled.sample()
        summary = summarize(rates_of(sampled.history.now, families.DURATION))
        assert number or summary["error_ratio"] is None
        sampled.call(times=number, status=status)
    recent = sampled.recent()
    assert (recent["calls_per_second"][0], recent["p99_ms"][0]) == (0, None)
    sampled.sample()
    summary = summarize(rates_of(sampled.history.now, families.DURATION))
    assert (summary["error_ratio"], summary["client_error_ratio"]) == (0.1, 0.3)


def test_rates_of_now_are_those_of_the_last_ten_seconds() -> None:
    sampled = _Sampled()
    sampled.sample()
    sampled.call(times=500)
    for _ in range(30):
        sampled.sample()
        sampled.call(times=2)
    window = sampled.history.now
    assert window is not None
    assert window.seconds == 10
    assert summarize(rates_of(window, families.DURATION))["calls_per_second"] == 2


def test_series_that_appear_later_are_counted_from_nothing() -> None:
    sampled = _Sampled()
    sampled.call()
    sampled.sample()
    for number in range(5):
        sampled.call(route=f"new {number}", times=3, status="5xx")
        sampled.sample()
    assert sampled.recent()["errors_per_second"] == [3] * 5
    rates = dict(rates_of(sampled.history.now, families.DURATION))
    assert rates["new 0", "infer", "m", "u", "json", "5xx"] == pytest.approx(0.6)
    assert ("r", "infer", "m", "u", "json", "2xx") not in rates


def test_window_is_as_before_while_series_appear() -> None:
    """A reader in a thread has a window while the next sample is taken."""
    sampled = _Sampled()
    sampled.sample()
    sampled.call(times=4)
    sampled.sample()
    window = sampled.history.now
    assert window is not None
    before = summarize(rates_of(window, families.DURATION))
    sampled.call(route="new", times=100)
    sampled.sample()
    assert summarize(rates_of(window, families.DURATION)) == before


def test_percentiles_are_of_the_last_minute_and_so_are_those_of_each_point() -> None:
    sampled = _Sampled()
    sampled.sample()
    for second in range(300):
        sampled.call(seconds=2.0 if second == 100 else 0.01, times=1)
        sampled.serve("http://one", 2.0 if second == 100 else 0.01)
        sampled.sample()
    recent = sampled.recent()["p99_ms"]
    slow = [number for number, value in enumerate(recent) if value > 1000]
    assert slow[0] == 100  # at once
    assert 60 <= len(slow) <= 70
    assert slow == list(range(100, 100 + len(slow)))
    for curve in (
        sampled.history.hour(),
        sampled.history.route_curves("r"),
        sampled.history.endpoint_curves("u", "http://one"),
    ):
        assert sum(value > 1000 for value in curve["p99_ms"]) in (6, 7)


def test_percentiles_are_of_each_model_and_route_over_all_workers() -> None:
    sampled = _Sampled()
    sampled.sample()
    for segment in range(2):
        for seconds in (0.1, 2.0):
            writer = sampled.store.writer(segment)
            writer.histogram(families.CALL_LATENCY, (f"m{seconds:g}",)).observe(seconds)
            writer.histogram(families.ROUTE_LATENCY, ("r",)).observe(seconds + segment)
    sampled.sample(after=42)
    minute = sampled.history.minute
    models = Percentiles(minute, families.CALL_LATENCY, lambda labels: labels)
    assert models.describe(("m2",)) == {
        "p50_ms": pytest.approx(2000, rel=0.02),
        "p90_ms": pytest.approx(2000, rel=0.02),
        "p95_ms": pytest.approx(2000, rel=0.02),
        "p99_ms": pytest.approx(2000, rel=0.02),
        "duration_window_seconds": 42,
    }
    assert models.describe(("n",))["p99_ms"] is None
    assert models.found.keys() == {("m0.1",), ("m2",)}
    # Histograms of workers are merged: the mean of their percentiles would be 2 s and 2.5 s.
    route = route_percentiles(minute).found["r",]
    assert route["p50"] == pytest.approx(1100, rel=0.02)
    assert route["p99"] == pytest.approx(3000, rel=0.02)
    assert Percentiles(minute, families.CALL_LATENCY).found[()]["p50"] == pytest.approx(
        100, rel=0.02
    )
    assert Percentiles(None, families.CALL_LATENCY).describe()["duration_window_seconds"] is None


def test_minute_is_as_long_as_is_known_and_then_a_minute() -> None:
    sampled = _Sampled()
    sampled.sample()
    assert sampled.history.minute is None
    lengths: list[float] = []
    for _ in range(200):
        sampled.sample()
        assert sampled.history.minute is not None
        lengths.append(sampled.history.minute[families.CALL_LATENCY].seconds)
    assert lengths == [min(seconds, 60) for seconds in range(1, 201)]


def test_an_hour_is_kept_and_no_more() -> None:
    sampled = _Sampled()
    for second in range(3700):
        sampled.call(times=1 + (second >= 1700))
        sampled.sample()
    recent, hour = sampled.history.recent(), sampled.history.hour()
    curves = recent.keys() - {"end", "step_seconds"}
    assert len(curves) == 7
    for name in curves:
        assert (len(recent[name]), len(hour[name])) == (RECENT_POINTS, HOUR_POINTS)
    assert (recent["end"], hour["step_seconds"]) == (NOW + 3700, 10)
    assert abs(hour["end"] - (NOW + 3700)) < 10
    assert set(recent["calls_per_second"]) == {2}
    # Calls doubled 2000 seconds ago, which is 200 points.
    doubled = [value > 1 for value in hour["calls_per_second"]]
    assert doubled.count(True) in (199, 200, 201)
    assert doubled == sorted(doubled)
    assert len(sampled.history._samples) <= 12


@pytest.mark.parametrize(
    ("gap", "recent"),
    [
        (5, [10, 10, *[None] * 4, 2, 10]),
        (1_000_000, [*[None] * (RECENT_POINTS - 2), 0, 10]),  # of days
    ],
)
def test_gap_has_no_values(gap: float, recent: list[float | None]) -> None:
    sampled = _Sampled()
    for after in (1, 1, 1, gap, 1):
        sampled.call(times=10)
        sampled.sample(after)
    assert sampled.recent()["calls_per_second"] == pytest.approx(recent, abs=0.001)


@pytest.mark.parametrize("jump", [-1_000_000.0, -1.0, -0.4])
def test_clock_that_is_set_back_leaves_the_values(jump: float) -> None:
    sampled = _Sampled()
    for number in range(6):
        sampled.call(times=10)
        sampled.at += 1
        sampled.history.sample(sampled.at, NOW + sampled.at + (jump if number >= 3 else 0))
    recent = sampled.recent()
    assert recent["calls_per_second"] == [10] * 5
    assert recent["end"] == pytest.approx(NOW + 6 + jump, abs=0.5)


@pytest.mark.parametrize("interval", [0.9, 1.01, 1.3, 2, 3, 4, 6, 7, 9, 13])
def test_points_are_where_their_times_are_however_late_samples_come(interval: float) -> None:
    """The page draws points by their number: a drift of a few percent would be minutes."""
    sampled = _Sampled()
    sampled.sample()
    count = 0
    for _ in range(int(400 / interval)):
        sampled.sample(interval)
        count += 1
    for document in (sampled.history.recent(), sampled.history.hour()):
        step = document["step_seconds"]
        assert document["end"] == pytest.approx(NOW + sampled.at, abs=max(step, 2 * interval))
        points = len(document["p50_ms"])
        if points < RECENT_POINTS and interval >= 1:
            assert points == pytest.approx(interval * count / step, abs=3)


def _fail(sampled: _Sampled, url: str, times: int, kind: str = "unreachable") -> None:
    sampled.store.writer(0).counter(families.ENDPOINT_FAILURES, ("u", url, kind)).add(times)


def test_endpoints_and_routes_have_curves_of_ten_seconds() -> None:
    sampled = _Sampled()
    sampled.sample()
    for _ in range(25):
        sampled.serve("http://one", 0.003, times=4)
        sampled.call(seconds=0.003, times=3)
        sampled.call(status="5xx", times=1)
        _fail(sampled, "http://one", 1, "5xx")
        _fail(sampled, "http://one", 1, "no_response")
        _fail(sampled, "http://refused", 2)
        sampled.sample()
    one = sampled.history.endpoint_curves("u", "http://one")
    assert one["step_seconds"] == 10
    assert one["calls_per_second"] == [4, 4, 4]
    assert one["errors_per_second"] == [2, 2, 2]
    assert one["p99_ms"] == [pytest.approx(3, rel=0.02)] * 3
    refused = sampled.history.endpoint_curves("u", "http://refused")
    assert refused["calls_per_second"] == [2, 2, 2]
    assert refused["errors_per_second"] == [2, 2, 2]
    assert refused["p99_ms"] == [None, None, None]
    route = sampled.history.route_curves("r")
    assert (route["calls_per_second"], route["errors_per_second"]) == ([4, 4, 4], [1, 1, 1])
    assert route["p99_ms"] == [pytest.approx(3, rel=0.02)] * 3
    nobody = sampled.history.route_curves("none")
    assert (nobody["calls_per_second"], nobody["p99_ms"]) == ([0, 0, 0], [None, None, None])


def test_of_very_many_endpoints_the_busiest_have_a_point() -> None:
    sampled = _Sampled()
    sampled.sample()
    for number in range(MAX_CURVES):
        sampled.serve(f"http://{number}", 0.003, times=2)
    sampled.serve("http://idle", 0.003)
    _fail(sampled, "http://failing", 1000)
    sampled.sample(after=10)
    curves = sampled.history.endpoint_curves
    assert curves("u", "http://idle")["calls_per_second"] == [0]
    assert curves("u", "http://failing")["errors_per_second"] == [100]
    assert curves("u", "http://0")["calls_per_second"] == [0.2]
    # They are chosen anew each time.
    sampled.serve("http://idle", 0.003)
    sampled.sample(after=10)
    assert curves("u", "http://idle")["calls_per_second"] == [0, 0.1]


@pytest.mark.parametrize(("cost", "interval"), [(0.0, 1), (0.019, 1), (0.021, 2), (0.09, 5)])
async def test_costly_samples_are_taken_less_often(
    monkeypatch: pytest.MonkeyPatch, cost: float, interval: float
) -> None:
    sampled = _Sampled()
    cpu_times = iter([5.0, 5.0 + cost])
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu_times))
    assert await _first_interval(sampled.history) == interval


async def test_waiting_for_a_busy_machine_is_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all cores are busy, operators look at the page."""
    sampled = _Sampled()
    sample = sampled.history.sample

    def sample_slowly(at: float, now: float) -> None:
        time.sleep(0.1)
        sample(at, now)

    monkeypatch.setattr(sampled.history, "sample", sample_slowly)
    assert await _first_interval(sampled.history) <= 2


async def _first_interval(history: History) -> float:
    """Run a history until its first pause, and return the interval that it chose."""
    history.interval = 0
    task = asyncio.create_task(history.run())
    await until(lambda: history.interval)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return history.interval


async def test_failing_sample_is_logged_and_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history_module, "INTERVAL", 0.001)
    sampled = _Sampled()
    sampled.history.interval = 0.001
    sample = sampled.history.sample

    def fail_once(at: float, now: float) -> None:
        monkeypatch.setattr(sampled.history, "sample", sample)
        raise RuntimeError("nonsense")

    monkeypatch.setattr(sampled.history, "sample", fail_once)
    task = asyncio.create_task(sampled.history.run())
    await until(lambda: len(sampled.history._samples) >= 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert caplog.messages == ["the metrics could not be sampled"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (123456, 123500), (0.000123456, 0.0001235), (math.nan, None), (math.inf, None)],
)
def test_numbers_have_four_digits(value: float, expected: float | None) -> None:
    assert rounded(value) == expected


# A latency is the same in /status, the documents of the page, and top


SECONDS = 2.0
MIRROR_URL = "http://mirror:1"
SETTINGS = make_settings(
    upstreams={"u": {"endpoints": [URL]}, "v": {"endpoints": [MIRROR_URL]}},
    routes=[{"name": "r", "upstream": "u", "mirror": {"upstream": "v"}}],
)
STATUS = worker_status({"u": upstream(endpoint()), "v": upstream(endpoint(url=MIRROR_URL))})


def _record(upstream: str = "u", url: str = URL, model: str = "m") -> CallRecord:
    record = CallRecord("POST", "/x")
    record.labels = CallLabels("r", "infer", model, "", "json")
    record.set_endpoint(upstream, url)
    record.begin_attempt(1.0)
    record.status, record.server_form = 200, "binary"
    record.seconds = record.server_seconds = record.first_byte_seconds = SECONDS
    return record


def _history(store: MetricStore, workers: int) -> History:
    """Count calls as so many workers do, between two samples of half a minute."""
    history = History(store, lambda: 0)
    history.sample(100.0, 1_700_000_000.0)
    for worker in range(workers):
        metrics = CallMetrics(store, store.writer(worker))
        for _ in range(3):
            metrics.observe(_record())
            metrics.observe_mirrored(_record("v", MIRROR_URL))
        failed = _record(model="unknown")
        failed.status = 404
        metrics.observe(failed)
    history.sample(130.0, 1_700_000_030.0)
    return history


def _documents(store: MetricStore, history: History) -> dict[str, Any]:
    state = state_of(STATUS, store, history)
    return {
        "/status": state.status,
        "overview": describe_overview(state, SETTINGS, 0.5) | {"recent": history.recent()},
        "history": history.hour(),
        "topology": describe_topology(state, history, SETTINGS, parse_choice({})),
        "models": describe_models(state, {}, {}),
        "model": describe_model(state, store, Savings(), "m"),
        "curves of a route": history.route_curves("r"),
        "curves of an endpoint": history.endpoint_curves("u", URL),
    }


def _percentiles(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """Yield each percentile below a value, with where it is."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _percentiles(each, f"{path} {name}")
    elif isinstance(value, list | tuple):
        for position, each in enumerate(value):
            yield from _percentiles(each, f"{path} {position}")
    elif any(word[:1] == "p" and word[1:3].isdigit() for word in path.split()) and value:
        yield path, value


def _windows(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        has_percentile = any(name in value for name in ("p99_ms", "duration_ms"))
        if has_percentile and "step_seconds" not in value:
            yield value["duration_window_seconds"]
        for each in value.values():
            yield from _windows(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _windows(each)


@pytest.mark.parametrize("workers", [1, 2])
def test_latency_of_two_seconds_is_shown_as_such_everywhere_with_its_window(workers: int) -> None:
    store = MetricStore(families.FAMILIES, 2)
    documents = _documents(store, _history(store, workers))
    found = [each for name, part in documents.items() for each in _percentiles(part, name)]
    for path, value in found:
        assert value == pytest.approx(1000 * SECONDS, rel=PRECISION), path
    paths = [path for path, _ in found]
    for name, document in documents.items():
        assert any(path.startswith(name) for path in paths)
        assert set(_windows(document)) <= {30}
    for part in (
        "/status upstreams u endpoints 0 duration_ms p99",
        "/status upstreams v endpoints 0 duration_ms p50",
        "overview now p95_ms",
        "overview recent p50_ms 0",
        "topology routes 0 p99_ms",
        "topology routes 0 recent p99_ms 0",
        "topology upstreams 1 endpoints 0 p99_ms",
        "models models 0 p99_ms",
        "models others p99_ms",
    ):
        assert part in paths
    for body, least in (
        (overview.describe_overview(documents["overview"], (200, 24)), 3),
        (lists.describe_endpoints(documents["topology"], 0, 200), 5),
        (lists.describe_models(documents["models"], 0, 200), 3),
    ):
        text = "\n".join(lines_of(body, 200))
        shown = sum(text.count(f"{seconds} s ") for seconds in ("1.97", "1.98", "2", "2.02"))
        assert shown >= least  # the middle of the fine bucket
        assert "last 30 s" in text


def test_history_samples_the_families_whose_rates_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them is read once a second, and kept for ten."""
    shown: set[Family] = set()
    change = Window.change

    def note(window: Window, family: Family) -> Words:
        shown.add(family)
        return change(window, family)

    monkeypatch.setattr(Window, "change", note)
    store = MetricStore(families.FAMILIES, 2)
    _documents(store, _history(store, 1))
    assert set(RATE_FAMILIES) == shown
