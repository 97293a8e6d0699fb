"""Renders the status of a gateway, and what it has counted, as Prometheus metrics.

What is counted is declared in call_metrics.py and gateway_metrics.py.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
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

from gateway.observe import families
from gateway.observe.metric_store import CountFamily, Family, HistogramFamily, Labels, MetricStore

_PROCESS_HELP = {
    "process_virtual_memory_bytes": "Virtual memory size of all workers in bytes.",
    "process_resident_memory_bytes": "Resident memory size of all workers in bytes.",
    "process_start_time_seconds": "Unix time at which the oldest worker was started, in seconds.",
    "process_open_fds": "Open file descriptors of all workers.",
    "process_max_fds": "Most file descriptors that all workers together may open.",
}

_BUILD_LABELS = ("version", "compiled", "python")

_OF_GATEWAY = {
    "settings_current": "1 while the newest settings are in use.",
    "settings_loaded_timestamp_seconds": "Unix time at which the settings in use were loaded.",
    "connections": "Open client connections.",
    "tls_handshakes": "TLS handshakes of clients in progress, which are no open connections yet.",
    "requests_in_progress": "Calls in progress.",
    "bodies_in_transit": "Bodies that are still arriving, from clients and from servers.",
    "buffered_bytes": "Bytes of buffered bodies, and of shared memory without a size.",
    "draining": "1 while the gateway drains before shutdown.",
    "workers": "Workers that are alive.",
}
_OF_LIMITS = {
    "concurrency_active": "Calls that have a slot of the limit.",
    "concurrency_max": "Slots of the limit.",
    "queue_length": "Calls that wait for a slot of the limit.",
}
_OF_ENDPOINTS = {
    "endpoint_requests_in_progress": "Calls in progress at the endpoint.",
    "endpoint_ejected": "1 while the endpoint is ejected because calls to it failed.",
    "endpoint_healthy": "1 while the endpoint's health checks succeed.",
    "endpoint_latency_outlier": "1 while the endpoint's calls take much longer than at its"
    " siblings, or than before.",
}
_OF_SHARED_MEMORY = {
    "shared_memory_bytes": "Bytes of the memory shared with the endpoint: its size at most, those"
    " allocated of it, those in_use by calls, and those in quarantine, which only the server may"
    " still use.",
}
_SHARED_MEMORY_STATES = ("size", "allocated", "in_use", "quarantined")


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
    """Yields the metrics of a store, with the last exemplar of each bucket."""

    def __init__(self, store: MetricStore, exemplars: Iterable[Sequence[Any]] = ()) -> None:
        self._store = store
        self._exemplars = {
            tuple(labels): Exemplar({"trace_id": trace_id}, seconds, time)
            for labels, trace_id, seconds, time in sorted(exemplars, key=itemgetter(3))
        }

    def collect(self) -> Iterator[Metric]:
        """Yield each metric, with its series summed up and sorted by their labels."""
        for family in self._store.shown:
            stored = family.histograms if isinstance(family, CountFamily) else family
            metric = _metric(family, sorted(self._store.sums(stored).items()))
            if family is families.DURATION and self._exemplars:
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
        status, settings = self._status, self._status["settings"]
        yield CounterMetricFamily(
            "tensorgate_metric_series_dropped",
            "How often a series had no room: its values count in series named other.",
            self._dropped_series,
        )
        values = {
            **status,
            "settings_current": settings["last_failure"] is None,
            "settings_loaded_timestamp_seconds": settings["loaded_at"],
            "workers": len(status["workers"]),
        }
        yield from _gauges(_OF_GATEWAY, (), [((), [values[name] for name in _OF_GATEWAY])])
        what = "Always 1; the labels tell what is running."
        info = GaugeMetricFamily("tensorgate_build_info", what, labels=_BUILD_LABELS)
        compiled = str(status["compiled"]).lower()
        info.add_metric([status["version"], compiled, platform.python_version()], 1.0)
        yield info
        for name, value in status["process"].items():
            yield GaugeMetricFamily(name, _PROCESS_HELP.get(name, name), value)
        yield from _gauges(_OF_LIMITS, ("upstream",), self._limits())
        yield from _gauges(_OF_ENDPOINTS, families.ENDPOINT_LABELS, self._endpoints())
        labels = (*families.ENDPOINT_LABELS, "state")
        yield from _gauges(_OF_SHARED_MEMORY, labels, self._shared_memory())

    def _limits(self) -> Iterator[_Row]:
        for name, part in {"": self._status, **self._status["upstreams"]}.items():
            if (limit := part["concurrency"]) is not None:
                yield (name,), (limit["active"], limit["max_requests"], limit["queued"])

    def _endpoints(self) -> Iterator[_Row]:
        for name, upstream in self._status["upstreams"].items():
            for endpoint in upstream["endpoints"]:
                yield (
                    (name, endpoint["url"]),
                    (
                        endpoint["requests_in_progress"],
                        endpoint["consecutive_ejections"] > 0,
                        endpoint["healthy"],
                        endpoint["latency_outlier"] is not None,
                    ),
                )

    def _shared_memory(self) -> Iterator[_Row]:
        for name, upstream in self._status["upstreams"].items():
            for endpoint in upstream["endpoints"]:
                if (shared := endpoint["shared_memory"]) is not None:
                    for state in _SHARED_MEMORY_STATES:
                        yield (name, endpoint["url"], state), (shared[state],)


_Row = tuple[Labels, Sequence[float | None]]
"""The labels of something, and its value in each gauge of a table; None where it has none."""


def _gauges(table: Mapping[str, str], labels: Labels, rows: Iterable[_Row]) -> Iterator[Metric]:
    """Yield the gauges of a table, which has their names without the prefix, and their helps."""
    gauges = [GaugeMetricFamily(f"tensorgate_{name}", table[name], labels=labels) for name in table]
    for part, values in rows:
        for gauge, value in zip(gauges, values, strict=True):
            if value is not None:
                gauge.add_metric(part, float(value))
    return iter(gauges)
