"""What a gateway's status says in numbers, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def exposition(status: Mapping[str, Any]) -> bytes:
    """Write the metrics of a status."""
    registry = CollectorRegistry()
    registry.register(_Status(status))
    return generate_latest(registry)


class _Status(Collector):
    """Makes metrics when they are asked for, so that nothing is counted twice."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield from self._of_settings()
        status = self._status
        yield _gauge("connections", "Connections of clients.", status["connections"])
        yield _gauge("requests", "Requests under way.", status["requests"])
        yield _gauge("held_bytes", "Bytes of bodies that are held.", status["held_bytes"])
        yield _gauge("draining", "Whether it lets what runs finish, to stop.", status["draining"])
        yield from self._of_endpoints()

    def _of_settings(self) -> Iterator[Metric]:
        settings = self._status["settings"]
        failed = settings["last_failure"] is not None
        yield _gauge("settings_current", "Whether the newest settings are in use.", not failed)
        yield _gauge("settings_loaded_seconds", "When they were loaded.", settings["loaded_at"])
        yield CounterMetricFamily(
            "tensorgate_reloads", "How often new settings came into use.", settings["reloads"]
        )
        yield CounterMetricFamily(
            "tensorgate_reload_failures", "How often they could not be used.", settings["failures"]
        )

    def _of_endpoints(self) -> Iterator[Metric]:
        labels = ["upstream", "endpoint"]
        outstanding = GaugeMetricFamily(
            "tensorgate_endpoint_requests", "Requests under way there.", labels=labels
        )
        ejected = GaugeMetricFamily(
            "tensorgate_endpoint_ejected", "Whether it is left out, as it failed.", labels=labels
        )
        healthy = GaugeMetricFamily(
            "tensorgate_endpoint_healthy", "Whether its probes succeed.", labels=labels
        )
        failures = CounterMetricFamily(
            "tensorgate_endpoint_failures",
            "Calls that failed there: no whole response, or one of 5xx.",
            labels=labels,
        )
        responses_5xx = CounterMetricFamily(
            "tensorgate_endpoint_responses_5xx", "Responses of 5xx from there.", labels=labels
        )
        for name, upstream in self._status["upstreams"].items():
            for endpoint in upstream["endpoints"]:
                values = [name, endpoint["url"]]
                outstanding.add_metric(values, endpoint["outstanding"])
                ejected.add_metric(values, float(endpoint["ejections"] > 0))
                failures.add_metric(values, endpoint["failures_total"])
                responses_5xx.add_metric(values, endpoint["responses_5xx"])
                if endpoint["healthy"] is not None:
                    healthy.add_metric(values, float(endpoint["healthy"]))
        yield from (outstanding, ejected, healthy, failures, responses_5xx)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tensorgate_{name}", documentation, float(value))
