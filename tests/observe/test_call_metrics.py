"""Calls are counted by labels that clients cannot drive; parts of the gateway count at once."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import parser as openmetrics

from gateway.errors import ErrorKind, GatewayError
from gateway.http1.head import HeaderField
from gateway.observe import metrics as metrics_module
from gateway.observe.call_metrics import CallMetrics
from gateway.observe.call_record import CallLabels, CallRecord
from gateway.observe.families import CALL_LATENCY, DURATION, ENDPOINT_LATENCY, FAMILIES
from gateway.observe.gateway_metrics import GatewayMetrics, LimitMetrics, OffloadMetrics
from gateway.observe.metric_store import MetricStore
from gateway.observe.metrics import StoreCollector, render_metrics
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import MemoryBudget

ENDPOINT = {"upstream": "u", "endpoint": "http://h:1"}
CALL = {
    "route": "r",
    "operation": "infer",
    "model": "m",
    "upstream": "u",
    "form": "json",
    "status": "2xx",
}


def _record(model: str = "m", status: int = 200, **fields: Any) -> CallRecord:
    record = CallRecord("POST", "/x")
    record.labels = CallLabels("r", "infer", model, "", "json")
    record.set_endpoint("u", "http://h:1")
    record.begin_attempt(1.0)
    record.status, record.seconds, record.server_form = status, 0.02, "binary"
    record.server_seconds, record.first_byte_seconds = 0.004, 0.003
    for name, value in fields.items():
        setattr(record, name, value)
    return record


class _Metrics:
    """Counts calls, and looks up what was counted."""

    def __init__(self, **options: Any) -> None:
        self.store = store = MetricStore(FAMILIES)
        self.gateway = GatewayMetrics(store.writer(0))
        self.metrics = CallMetrics(store, store.writer(0), **options)
        self.registry = CollectorRegistry()
        self.registry.register(StoreCollector(store))

    def observe(self, *records: CallRecord) -> None:
        for record in records:
            self.metrics.observe(record)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"tensorgate_{name}", labels)

    def labels(self, name: str, label: str) -> set[str]:
        return {
            sample.labels[label]
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == f"tensorgate_{name}"
        }


def test_call_is_counted_with_its_times_and_sizes() -> None:
    metrics = _Metrics()
    sizes: dict[str, Any] = {"request_bytes": 10, "response_bytes": 20}
    sizes |= {"sent_bytes": 30, "received_bytes": 40}
    sizes |= {"request_elements": 16, "response_elements": 4}
    metrics.observe(_record(**sizes), _record(**sizes))
    assert metrics.value("requests_total", **CALL) == 2
    assert metrics.value("request_duration_seconds_count", **CALL) == 2
    assert metrics.value("request_duration_seconds_sum", **CALL) == pytest.approx(0.04)
    assert metrics.value("request_duration_seconds_bucket", **CALL, le="0.01") == 0
    assert metrics.value("request_duration_seconds_bucket", **CALL, le="0.025") == 2
    assert metrics.value("server_duration_seconds_sum", **ENDPOINT) == pytest.approx(0.008)
    assert metrics.value("server_first_byte_seconds_sum", **ENDPOINT) == pytest.approx(0.006)
    assert metrics.value("request_body_bytes_total", route="r") == 20
    assert metrics.value("response_body_bytes_total", route="r") == 40
    assert metrics.value("server_sent_body_bytes_total", **ENDPOINT) == 60
    assert metrics.value("server_received_body_bytes_total", **ENDPOINT) == 80
    assert metrics.value("conversions_total", client_form="json", server_form="binary") == 2
    assert metrics.value("converted_elements_total", direction="request") == 32
    assert metrics.value("converted_elements_total", direction="response") == 8
    assert metrics.labels("errors_total", "kind") == metrics.labels("retries_total", "upstream")


@pytest.mark.parametrize(
    ("status", "label"), [(200, "2xx"), (304, "3xx"), (404, "4xx"), (503, "5xx"), (0, "aborted")]
)
def test_status_is_a_class(status: int, label: str) -> None:
    metrics = _Metrics()
    metrics.observe(_record("", status))
    assert metrics.value("requests_total", **{**CALL, "model": "", "status": label}) == 1


def test_error_is_counted_by_its_kind() -> None:
    metrics = _Metrics()
    refused, left = _record(status=503, attempts=0, endpoint=""), _record(status=0)
    refused.set_error(GatewayError(ErrorKind.OVERLOADED, "full"))
    left.error = "the client closed the connection"
    metadata = _record(status=500)  # a server's own errors are none of the gateway's
    metadata.set_passed_error(500, "CUDA out of memory")
    metrics.observe(refused, refused, left, _record(status=500), metadata)
    assert metrics.value("errors_total", kind="overloaded", upstream="u") == 2
    assert metrics.value("errors_total", kind="aborted", upstream="u") == 1
    assert metrics.labels("errors_total", "kind") == {"overloaded", "aborted"}


def test_refused_call_has_no_times_of_a_server() -> None:
    metrics = _Metrics()
    metrics.observe(_record(status=503, attempts=0, sent_at=0.0))
    assert metrics.labels("server_duration_seconds_count", "endpoint") == set()


def test_model_needs_a_success_of_a_server() -> None:
    metrics = _Metrics()
    metrics.observe(
        _record("unknown", 404),
        _record("moved", 302),
        _record("refused", 200, attempts=0),
        _record("aborted", 0),
        _record("unloaded", labels=CallLabels("r", "repository", "unloaded")),
        _record("asked", labels=CallLabels("r", "health", "asked")),
        _record("real", 200),
        _record("real", 500),
    )
    assert metrics.labels("requests_total", "model") == {"other", "real"}
    assert metrics.value("requests_total", **{**CALL, "model": "real", "status": "5xx"}) == 1


def test_number_of_models_is_bounded() -> None:
    metrics = _Metrics(max_models=6)
    metrics.observe(*(_record(f"model {n}") for n in range(1000)), _record("model 0"))
    assert metrics.labels("requests_total", "model") == {"model 0", "model 1", "model 2", "other"}
    assert metrics.value("requests_total", **{**CALL, "model": "other"}) == 997
    assert metrics.value("requests_total", **{**CALL, "model": "model 0"}) == 2


def test_second_half_of_the_labels_goes_to_models_that_are_used() -> None:
    metrics = _Metrics(max_models=4)
    metrics.observe(_record("a"), _record("b"))
    for number in range(3000):
        metrics.observe(_record(f"rare {number}"))
        if not number % 20:
            metrics.observe(*(_record(f"used {n}") for n in range(3)))
    models = metrics.labels("requests_total", "model")
    assert models == {"a", "b", "used 0", "used 1", "other"}
    used = metrics.value("requests_total", **{**CALL, "model": "used 0"})
    assert used == 150 - 49


@pytest.mark.parametrize(("others", "is_labelled"), [(999, True), (1000, False)])
def test_calls_of_so_many_models_are_remembered(others: int, is_labelled: bool) -> None:
    metrics = _Metrics(max_models=2)
    metrics.observe(_record("labelled"), *[_record("used")] * 49)
    metrics.observe(*(_record(f"rare {number}") for number in range(others)), _record("used"))
    assert ("used" in metrics.labels("requests_total", "model")) == is_labelled


def test_workers_agree_on_the_models_with_numbers() -> None:
    store = MetricStore(FAMILIES, 2)
    workers = [CallMetrics(store, store.writer(segment), max_models=6) for segment in range(2)]
    for number in range(10):
        for turn, worker in enumerate(workers):
            model = f"model {(5 * turn + number) % 10}"
            worker.observe(_record(model, started=10.0 * number + turn))
    assert store.label_values(DURATION, "model") == {"model 0", "model 1", "model 5", "other"}
    successor = CallMetrics(store, store.writer(0), max_models=6)
    for number in range(10):
        successor.observe(_record(f"model {number}", started=1000.0))
    assert store.label_values(DURATION, "model") == {"model 0", "model 1", "model 5", "other"}


def test_each_attempt_is_counted_at_its_endpoint() -> None:
    metrics, record = _Metrics(), _record(sent_bytes=10, received_bytes=1, retries=3)
    record.set_endpoint("u", "http://h:2")
    record.begin_attempt(2.0)
    record.server_seconds, record.sent_bytes = 0.5, 10
    record.set_endpoint("u", "http://h:3")
    record.begin_attempt(3.0)
    record.forget_attempt()
    record.set_endpoint("u", "http://h:4")
    record.begin_attempt(4.0)
    record.server_seconds = record.first_byte_seconds = 0.25
    record.sent_bytes, record.received_bytes = 10, 2
    metrics.observe(record)
    assert metrics.value("retries_total", upstream="u") == 3
    assert (record.attempts, record.total_sent_bytes, record.total_received_bytes) == (4, 30, 3)
    names = [f"server_{each}" for each in ("duration_seconds_sum", "first_byte_seconds_count")]
    names += [f"server_{each}_body_bytes_total" for each in ("sent", "received")]
    expected = {1: (0.004, 1, 10, 1), 2: (0.5, 0, 10, 0), 3: (None,) * 4, 4: (0.25, 1, 10, 2)}
    for number, values in expected.items():
        labels = {"upstream": "u", "endpoint": f"http://h:{number}"}
        assert tuple(metrics.value(name, **labels) for name in names) == values


def test_memory_for_endpoints_is_bounded() -> None:
    metrics = _Metrics()
    for number in range(10_000):
        metrics.observe(_record(endpoint=f"http://h:{number}"))
    assert len(metrics.metrics._endpoints) <= 2048
    counts = [
        sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "tensorgate_server_duration_seconds_count"
    ]
    assert sum(counts) == 10_000
    assert "other" in metrics.labels("server_duration_seconds_count", "endpoint")
    metrics.observe(_record("late", 500), _record("late"))
    assert metrics.value("requests_total", **{**CALL, "model": "late"}) == 1
    assert metrics.value("requests_total", **{**CALL, "model": "other", "status": "5xx"}) == 1


def test_latency_is_that_of_calls_that_do_not_fail_by_model() -> None:
    """A refusal or an error is fast, and a timeout is as long as its limit."""
    metrics = _Metrics()
    metrics.observe(_record(), _record("n"), _record(), _record(status=404), _record(status=0))
    metrics.observe(_record(status=500))
    metrics.observe(_record(status=504, error_kind=ErrorKind.SERVER_TIMEOUT))
    retried = _record()
    retried.set_endpoint("u", "http://h:2")
    retried.begin_attempt(2.0)
    retried.server_seconds = retried.first_byte_seconds = 0.004
    metrics.observe(retried)
    words = metrics.store.sums(ENDPOINT_LATENCY)
    counts = {labels[1:]: sum(each) for labels, each in words.items() if sum(each)}
    assert counts == {("http://h:1", "m"): 4, ("http://h:1", "n"): 1, ("http://h:2", "m"): 1}
    all_calls = sum(sum(each) for each in metrics.store.sums(CALL_LATENCY).values())
    assert all_calls == 8


def test_latency_is_not_that_of_clients_that_give_up_before_a_response() -> None:
    metrics = _Metrics()
    metrics.observe(_record(status=0, first_byte_seconds=0.0, error="the client left"))
    assert not any(map(sum, metrics.store.sums(ENDPOINT_LATENCY).values()))
    assert metrics.value("server_duration_seconds_count", **ENDPOINT) == 1


def test_models_whose_latency_is_measured_apart_are_bounded() -> None:
    metrics = _Metrics()
    for endpoint in range(300):
        for model in ("m", "n"):
            metrics.observe(_record(model, endpoint=f"http://h:{endpoint}"))
    series = [labels for labels in metrics.store.sums(ENDPOINT_LATENCY) if labels[0] == "u"]
    assert sum(bool(model) for _, _, model in series) == 500
    assert len({url for _, url, _ in series}) == 300


def test_lane_of_tensors_is_counted_at_each_endpoint() -> None:
    metrics, record = _Metrics(), _record()
    record.add_lane("inputs", "full")
    record.set_endpoint("u", "http://h:2")
    record.add_lane("inputs", "")
    metrics.observe(record, record, _record())
    labels = {**ENDPOINT, "tensors": "inputs", "lane": "socket", "reason": "full"}
    assert metrics.value("shared_memory_calls_total", **labels) == 2
    labels |= {"endpoint": "http://h:2", "lane": "shared_memory", "reason": ""}
    assert metrics.value("shared_memory_calls_total", **labels) == 2
    assert metrics.labels("shared_memory_calls_total", "endpoint") == {"http://h:1", "http://h:2"}


def test_mirrored_request_counts_at_its_endpoint_and_is_no_call() -> None:
    metrics = _Metrics()
    for status in (200, 500, 404):
        metrics.metrics.observe_mirrored(_record(status=status))
    assert metrics.value("server_duration_seconds_count", **ENDPOINT) == 3
    for status_class in ("2xx", "4xx", "5xx"):
        assert metrics.value("server_responses_total", **ENDPOINT, status=status_class) == 1
    assert metrics.labels("requests_total", "model") == set()
    (words,) = metrics.store.sums(ENDPOINT_LATENCY).values()
    assert sum(words[1:]) == 2  # not of the one that failed


# What the parts of the gateway count


async def test_limit_counts_refusals_and_the_wait() -> None:
    metrics = _Metrics()
    gateway, value = metrics.gateway, metrics.value
    limit = ConcurrencyLimit("it", 1, 1, 0.02, LimitMetrics(gateway.writer, "u"))
    with Deadline(10, 10) as deadline:
        await limit.acquire(deadline)
        waiting = asyncio.create_task(limit.acquire(deadline))
        await asyncio.sleep(0)
        with pytest.raises(GatewayError):
            limit.check_room()
        with pytest.raises(GatewayError):
            await waiting
        cancelled = asyncio.create_task(limit.acquire(deadline))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
    assert value("refusals_total", limit="concurrency", upstream="u") == 1
    assert value("refusals_total", limit="queue_timeout", upstream="u") == 1
    assert value("queue_wait_seconds_count", upstream="u") == 2
    assert (value("queue_wait_seconds_sum", upstream="u") or 0) >= 0.018


def test_memory_budget_counts_refusals() -> None:
    metrics = _Metrics()
    gateway, value = metrics.gateway, metrics.value
    budget = MemoryBudget(1000, gateway.memory_refusals("memory"))
    with budget.reserve() as reservation, pytest.raises(GatewayError):
        reservation.resize(1001)
    with pytest.raises(GatewayError):
        budget.check_admission()
    assert value("refusals_total", limit="memory", upstream="") == 2


def test_results_are_shown_before_there_are_any() -> None:
    """So that a rate over the first ones is right."""
    metrics = _Metrics()
    gateway, value = metrics.gateway, metrics.value
    gateway.mirror("r", "m")
    OffloadMetrics(gateway.writer)
    assert value("mirror_requests_total", route="r", upstream="m", result="failed") == 0
    assert value("offload_jobs_total", result="local") == 0


def test_endpoint_failures_and_ejections_are_counted() -> None:
    metrics = _Metrics()
    gateway, value = metrics.gateway, metrics.value
    labels = {"upstream": "u", "endpoint": "http://h:1"}
    for kind in ("5xx", "unreachable", "5xx"):
        gateway.count_failure("u", "http://h:1", kind)
    gateway.count_ejection("u", "http://h:1")
    assert value("endpoint_failures_total", **labels, kind="5xx") == 2
    assert value("endpoint_failures_total", **labels, kind="unreachable") == 1
    assert value("ejections_total", **labels) == 1


# What /metrics shows

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
        "shared_memory": {"size": 8, "allocated": 6, "in_use": 3, "quarantined": 1, "why_not": ""},
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


def _shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:
    """Return the type and the labels of each metric in /metrics."""
    registries: list[CollectorRegistry] = []

    def encode(registry: CollectorRegistry) -> bytes:
        registries.append(registry)
        return b""

    monkeypatch.setattr(metrics_module, "choose_encoder", lambda _: (encode, ""))
    render_metrics(_status(), MetricStore(FAMILIES))
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


def test_shared_memory_is_shown_by_its_state() -> None:
    text, _ = render_metrics(_status(), MetricStore(FAMILIES))
    for state, value in (("size", 8), ("allocated", 6), ("in_use", 3), ("quarantined", 1)):
        labels = f'endpoint="http://h:1",state="{state}",upstream="u"'
        assert f"tensorgate_shared_memory_bytes{{{labels}}} {value}.0\n" in text.decode()


def _traced(traceparent: str, seconds: float, started: float) -> CallRecord:
    parent = HeaderField("traceparent", "traceparent", traceparent, b"", 0, 0)
    return _record(seconds=seconds, started=started, noted=(parent,))


def _exemplars(text: bytes) -> dict[str, str]:
    """Return the trace ids in a text of OpenMetrics, by the bound of the bucket."""
    return {
        sample.labels["le"]: sample.exemplar.labels["trace_id"]
        for family in openmetrics.text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }


def test_openmetrics_shows_the_last_traced_call_of_each_bucket() -> None:
    store = MetricStore(FAMILIES)
    metrics = CallMetrics(store, store.writer(0))
    one, two, three, four = (f"{number:032x}" for number in range(1, 5))
    for number, (trace, flags, seconds) in enumerate(
        [(one, "01", 0.002), (two, "01", 0.002), (three, "00", 0.002), (four, "03", 1000.0)], 1
    ):
        line = f"00-{trace}-{1:016x}-{flags}"
        metrics.observe(_traced(line, seconds, float(number)))
    metrics.observe(_traced("", 0.2, 9.0))
    text, content_type = render_metrics(_status(), store, metrics.exemplars(), OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert _exemplars(text) == {"0.0025": two, "+Inf": four}
    plain, content_type = render_metrics(_status(), store, metrics.exemplars())
    assert content_type.startswith("text/plain; version=0.0.4")
    assert one.encode() not in plain
    assert two.encode() not in plain
    assert b"\ntensorgate_draining 0.0\n" in plain


def test_number_of_exemplars_is_bounded() -> None:
    store = MetricStore(FAMILIES)
    metrics = CallMetrics(store, store.writer(0))
    for number in range(300):
        record = _traced(f"00-{number + 1:032x}-{1:016x}-01", 0.02, number + 1.0)
        record.labels = CallLabels(str(number), "infer")
        metrics.observe(record)
    traces = {exemplar[1] for exemplar in metrics.exemplars()}
    assert traces == {f"{number:032x}" for number in range(101, 301)}
