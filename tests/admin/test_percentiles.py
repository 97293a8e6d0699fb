"""A latency is the same wherever it is shown: /status, the documents of the page, and top."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gateway.admin.history import History
from gateway.admin.panels.models import Savings, describe_model, describe_models
from gateway.admin.panels.overview import describe_overview
from gateway.admin.panels.topology import describe_topology, parse_choice
from gateway.observe import families
from gateway.observe.call_metrics import CallMetrics
from gateway.observe.call_record import CallLabels, CallRecord
from gateway.observe.metric_cells import PRECISION
from gateway.observe.metric_store import MetricStore
from gateway.top import panels
from tests.admin.site import URL, endpoint, make_settings, state_of, upstream, worker_status
from tests.top.documents import lines_of

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
        (panels.describe_overview(documents["overview"], (200, 24)), 3),
        (panels.describe_endpoints(documents["topology"], 0, 200), 5),
        (panels.describe_models(documents["models"], 0, 200), 3),
    ):
        text = "\n".join(lines_of(body, 200))
        shown = sum(text.count(f"{seconds} s ") for seconds in ("1.97", "1.98", "2", "2.02"))
        assert shown >= least  # the middle of the fine bucket
        assert "last 30 s" in text
