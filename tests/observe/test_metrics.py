"""The metrics page lists all that /metrics shows, and OpenMetrics has exemplars."""

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import parser as openmetrics

from gateway.http1.head import HeaderField
from gateway.observe import families
from gateway.observe import metrics as metrics_module
from gateway.observe.call_metrics import CallMetrics
from gateway.observe.call_record import CallLabels, CallRecord
from gateway.observe.gateway_metrics import GatewayMetrics
from gateway.observe.metric_store import MetricStore
from gateway.observe.metrics import render_metrics

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "metrics.md"
OPENMETRICS = "application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.5"
PROCESS = (
    "process_virtual_memory_bytes process_resident_memory_bytes process_start_time_seconds "
    "process_open_fds process_max_fds"
)


def _status() -> dict[str, Any]:
    """Return a status with a value for each gauge."""
    concurrency = {"active": 1, "queued": 2, "max_requests": 3}
    endpoint = {
        "url": "http://h:1",
        "requests_in_progress": 1,
        "consecutive_ejections": 1,
        "healthy": True,
        "latency_outlier": None,
    }
    return {
        "version": "1",
        "compiled": True,
        "draining": False,
        "connections": 1,
        "tls_handshakes": 2,
        "requests_in_progress": 1,
        "bodies_in_transit": 1,
        "buffered_bytes": 1,
        "settings": {"last_failure": None, "loaded_at": 1.0},
        "workers": [{}, {}],
        "process": dict.fromkeys(PROCESS.split(), 1.0),
        "concurrency": concurrency,
        "upstreams": {"u": {"concurrency": concurrency, "endpoints": [endpoint]}},
    }


def _store() -> MetricStore:
    return MetricStore(families.FAMILIES)


def _shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:
    """Return the type and the labels of each metric in /metrics."""
    registries: list[CollectorRegistry] = []

    def encode(registry: CollectorRegistry) -> bytes:
        registries.append(registry)
        return b""

    monkeypatch.setattr(metrics_module, "choose_encoder", lambda _: (encode, ""))
    render_metrics(_status(), _store())
    shown = {}
    for metric in registries[0].collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels: tuple[str, ...] = metric._labelnames  # type: ignore[attr-defined]  # no other way
        shown[name] = metric.type, ", ".join(labels)
    return shown


def test_page_lists_each_metric_with_its_type_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    row = re.compile(r"^\| `((?:tensorgate|process)_\w+)` \| (\w+) \| ([^|]*?) ?\|", re.MULTILINE)
    rows = row.findall(PAGE.read_text())
    listed = {name: (kind, labels) for name, kind, labels in rows}
    assert len(listed) == len(rows)
    assert listed == _shown(monkeypatch)


def _observe(metrics: CallMetrics, traceparent: str, seconds: float, started: float) -> None:
    record = CallRecord("POST", "/x", started=started)
    record.labels = CallLabels("r", "infer", "m", "", "json")
    record.upstream, record.endpoint, record.attempts, record.status = "u", "http://h:1", 1, 200
    record.seconds = seconds
    record.noted = (HeaderField("traceparent", "traceparent", traceparent, b"", 0, 0),)
    metrics.observe(record)


def _exemplars(text: bytes) -> dict[str, str]:
    """Return the trace ids in a text of OpenMetrics, by the bound of the bucket."""
    return {
        sample.labels["le"]: sample.exemplar.labels["trace_id"]
        for family in openmetrics.text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }


def test_openmetrics_shows_the_last_traced_call_of_each_bucket() -> None:
    store = _store()
    metrics = CallMetrics(store, store.writer(0))
    GatewayMetrics(store.writer(0))
    one, two, three, four = (f"{number:032x}" for number in range(1, 5))
    for number, (trace, flags, seconds) in enumerate(
        [(one, "01", 0.002), (two, "01", 0.002), (three, "00", 0.002), (four, "03", 1000.0)], 1
    ):
        line = f"00-{trace}-{1:016x}-{flags}"
        _observe(metrics, line, seconds, started=float(number))
    _observe(metrics, "", 0.2, started=9.0)
    text, content_type = render_metrics(_status(), store, metrics.exemplars(), OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert _exemplars(text) == {"0.0025": two, "+Inf": four}
    plain, content_type = render_metrics(_status(), store, metrics.exemplars())
    assert content_type.startswith("text/plain; version=0.0.4")
    assert one.encode() not in plain
    assert two.encode() not in plain
    assert b"\ntensorgate_draining 0.0\n" in plain


def test_number_of_exemplars_is_bounded() -> None:
    store = _store()
    metrics = CallMetrics(store, store.writer(0))
    for number in range(300):
        line = f"00-{number + 1:032x}-{1:016x}-01"
        record = CallRecord("POST", "/x", started=float(number + 1))
        record.labels = CallLabels(str(number), "infer")
        record.status = 200
        record.noted = (HeaderField("traceparent", "traceparent", line, b"", 0, 0),)
        metrics.observe(record)
    traces = {exemplar[1] for exemplar in metrics.exemplars()}
    assert traces == {f"{number:032x}" for number in range(101, 301)}
