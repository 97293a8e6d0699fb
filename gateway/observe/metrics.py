"""Renders the status of a gateway, and what it has counted, as Prometheus metrics.

What is counted is declared in call_metrics.py and gateway_metrics.py.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

from gateway.observe.call_metrics import DURATION
from gateway.observe.metric_store import (
    CountFamily,
    Family,
    HistogramFamily,
    Labels,
    MetricStore,
)

_PROCESS_HELP = {
    "process_virtual_memory_bytes": "Virtual memory size of all workers in bytes.",
    "process_resident_memory_bytes": "Resident memory size of all workers in bytes.",
    "process_start_time_seconds": "Unix time at which the oldest worker was started, in seconds.",
    "process_open_fds": "Open file descriptors of all workers.",
    "process_max_fds": "Most file descriptors that all workers together may open.",
}


def render_metrics(
    status: Mapping[str, Any],
    store: MetricStore,
    exemplars: Iterable[Sequence[Any]] = (),
    accept: str = "",
) -> tuple[bytes, str]:
    """Render a merged status, and the numbers of a store; return the text and its type.

    It is Prometheus' text format, or OpenMetrics with ``exemplars`` if the ``accept`` header asks
    for it.
    """
    registry = CollectorRegistry()
    registry.register(StoreCollector(store, exemplars))
    registry.register(_StatusCollector(status, store.full))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def collect(store: MetricStore) -> Iterator[Metric]:
    """Yield each metric of a store, with its series summed up and sorted by their labels."""
    for family in store.shown:
        stored = family.histograms if isinstance(family, CountFamily) else family
        yield _metric(family, sorted(store.sums(stored).items()))


def _metric(family: Family | CountFamily, series: Iterable[tuple[Labels, list[float]]]) -> Metric:
    name, documentation = family.name, family.documentation
    if isinstance(family, HistogramFamily):
        histogram = HistogramMetricFamily(name, documentation, labels=family.labels)
        bounds = (*map(floatToGoString, family.buckets), "+Inf")
        for labels, (total, *counts) in series:
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            histogram.add_metric(labels, buckets, total)
        return histogram
    counts_values = isinstance(family, CountFamily)
    names = family.histograms.labels if isinstance(family, CountFamily) else family.labels
    counter = CounterMetricFamily(name, documentation, labels=names)
    for labels, words in series:
        counter.add_metric(labels, sum(words[1:]) if counts_values else words[0])
    return counter


class StoreCollector(Collector):
    """Yields the metrics of a store, with exemplars."""

    def __init__(self, store: MetricStore, exemplars: Iterable[Sequence[Any]] = ()) -> None:
        self._store = store
        self._exemplars = {
            tuple(labels): Exemplar({"trace_id": trace_id}, seconds, time)
            for labels, trace_id, seconds, time in sorted(exemplars, key=_time)
        }

    def collect(self) -> Iterator[Metric]:
        """Yield each metric."""
        for metric in collect(self._store):
            if metric.name == DURATION.name and self._exemplars:
                metric.samples = list(map(self._with_exemplar, metric.samples))
            yield metric

    def _with_exemplar(self, sample: Sample) -> Sample:
        exemplar = self._exemplars.get(tuple(sample.labels.values()))
        return sample if exemplar is None else sample._replace(exemplar=exemplar)


class _StatusCollector(Collector):
    """Makes the metrics from the status at each scrape, so that no value is kept twice."""

    def __init__(self, status: Mapping[str, Any], dropped_series: int) -> None:
        self._status = status
        self._dropped_series = dropped_series

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "tensorgate_metric_series_dropped",
            "How often a series had no room: its values count in series named other.",
            self._dropped_series,
        )
        yield from self._settings_metrics()
        status = self._status
        yield _gauge("connections", "Open client connections.", status["connections"])
        yield _gauge(
            "tls_handshakes",
            "TLS handshakes of clients in progress, which are no open connections yet.",
            status["tls_handshakes"],
        )
        yield _gauge("requests_in_progress", "Calls in progress.", status["requests_in_progress"])
        yield _gauge(
            "bodies_in_transit",
            "Bodies that are still arriving, from clients and from servers.",
            status["bodies_in_transit"],
        )
        yield _gauge("buffered_bytes", "Bytes of buffered bodies.", status["buffered_bytes"])
        yield _gauge("draining", "1 while the gateway drains before shutdown.", status["draining"])
        yield _gauge("workers", "Workers that are alive.", len(status["workers"]))
        info = GaugeMetricFamily(
            "tensorgate_build_info",
            "Always 1; the labels tell what is running.",
            labels=["version", "compiled", "python"],
        )
        compiled = str(status["compiled"]).lower()
        info.add_metric([status["version"], compiled, platform.python_version()], 1.0)
        yield info
        for name, value in status["process"].items():
            yield GaugeMetricFamily(name, _PROCESS_HELP.get(name, name), value)
        yield from self._concurrency_metrics()
        yield from self._endpoint_metrics()

    def _concurrency_metrics(self) -> Iterator[Metric]:
        labels = ["upstream"]
        active = GaugeMetricFamily(
            "tensorgate_concurrency_active", "Calls that have a slot of the limit.", labels=labels
        )
        most = GaugeMetricFamily("tensorgate_concurrency_max", "Slots of the limit.", labels=labels)
        queued = GaugeMetricFamily(
            "tensorgate_queue_length", "Calls that wait for a slot of the limit.", labels=labels
        )
        parts = {name: each["concurrency"] for name, each in self._status["upstreams"].items()}
        for name, concurrency in ({"": self._status["concurrency"]} | parts).items():
            if concurrency is not None:
                active.add_metric([name], concurrency["active"])
                most.add_metric([name], concurrency["max_requests"])
                queued.add_metric([name], concurrency["queued"])
        yield from (active, most, queued)

    def _settings_metrics(self) -> Iterator[Metric]:
        settings = self._status["settings"]
        failed = settings["last_failure"] is not None
        yield _gauge("settings_current", "1 while the newest settings are in use.", not failed)
        yield _gauge(
            "settings_loaded_timestamp_seconds",
            "Unix time at which the settings in use were loaded.",
            settings["loaded_at"],
        )

    def _endpoint_metrics(self) -> Iterator[Metric]:
        labels = ["upstream", "endpoint"]
        outstanding = GaugeMetricFamily(
            "tensorgate_endpoint_requests_in_progress",
            "Calls in progress at the endpoint.",
            labels=labels,
        )
        ejected = GaugeMetricFamily(
            "tensorgate_endpoint_ejected",
            "1 while the endpoint is ejected because calls to it failed.",
            labels=labels,
        )
        healthy = GaugeMetricFamily(
            "tensorgate_endpoint_healthy",
            "1 while the endpoint's health checks succeed.",
            labels=labels,
        )
        outlier = GaugeMetricFamily(
            "tensorgate_endpoint_latency_outlier",
            "1 while the endpoint's calls take much longer than at its siblings, or than before.",
            labels=labels,
        )
        for name, upstream in self._status["upstreams"].items():
            for endpoint in upstream["endpoints"]:
                values = [name, endpoint["url"]]
                outstanding.add_metric(values, endpoint["requests_in_progress"])
                ejected.add_metric(values, float(endpoint["consecutive_ejections"] > 0))
                outlier.add_metric(values, float(endpoint["latency_outlier"] is not None))
                if endpoint["healthy"] is not None:
                    healthy.add_metric(values, float(endpoint["healthy"]))
        yield from (outstanding, ejected, healthy, outlier)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tensorgate_{name}", documentation, float(value))


def _time(exemplar: Sequence[Any]) -> float:
    """Return when an exemplar was taken; the last one of a bucket is shown."""
    time: float = exemplar[3]
    return time
