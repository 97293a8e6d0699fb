"""Renders the status of a gateway as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def render_metrics(status: Mapping[str, Any], store: Collector) -> bytes:
    """Render a status, and the numbers of a store, in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(store)
    registry.register(_StatusCollector(status))
    return generate_latest(registry)


class _StatusCollector(Collector):
    """Makes the metrics from the status at each scrape, so that no value is kept twice."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield from self._settings_metrics()
        status = self._status
        yield _gauge("connections", "Open client connections.", status["connections"])
        yield _gauge("requests_in_progress", "Calls in progress.", status["requests_in_progress"])
        yield _gauge("buffered_bytes", "Bytes of buffered bodies.", status["buffered_bytes"])
        yield _gauge("draining", "1 while the gateway drains before shutdown.", status["draining"])
        yield from self._endpoint_metrics()

    def _settings_metrics(self) -> Iterator[Metric]:
        settings = self._status["settings"]
        failed = settings["last_failure"] is not None
        yield _gauge("settings_current", "1 while the newest settings are in use.", not failed)
        yield _gauge(
            "settings_loaded_timestamp_seconds",
            "Unix time at which the settings in use were loaded.",
            settings["loaded_at"],
        )
        yield CounterMetricFamily(
            "tensorgate_reloads", "Reloads that took effect.", settings["reloads"]
        )
        yield CounterMetricFamily(
            "tensorgate_reload_failures", "Reloads that failed.", settings["reload_failures"]
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
        failures = CounterMetricFamily(
            "tensorgate_endpoint_failures",
            "Failed calls to the endpoint: no complete response, or a 5xx response.",
            labels=labels,
        )
        responses_5xx = CounterMetricFamily(
            "tensorgate_endpoint_responses_5xx", "5xx responses of the endpoint.", labels=labels
        )
        for name, upstream in self._status["upstreams"].items():
            for endpoint in upstream["endpoints"]:
                values = [name, endpoint["url"]]
                outstanding.add_metric(values, endpoint["requests_in_progress"])
                ejected.add_metric(values, float(endpoint["consecutive_ejections"] > 0))
                failures.add_metric(values, endpoint["failures_total"])
                responses_5xx.add_metric(values, endpoint["responses_5xx"])
                if endpoint["healthy"] is not None:
                    healthy.add_metric(values, float(endpoint["healthy"]))
        yield from (outstanding, ejected, healthy, failures, responses_5xx)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tensorgate_{name}", documentation, float(value))
