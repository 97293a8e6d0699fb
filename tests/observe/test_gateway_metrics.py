"""The parts of the gateway count at once, each in its own series."""

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from gateway.errors import GatewayError
from gateway.observe.gateway_metrics import (
    GATEWAY_FAMILIES,
    RELOAD_FAILURES,
    GatewayMetrics,
    LimitMetrics,
    OffloadMetrics,
)
from gateway.observe.metric_store import MetricStore
from gateway.observe.metrics import StoreCollector
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import MemoryBudget

Value = Callable[..., float | None]


@pytest.fixture
def metrics_and_value() -> tuple[GatewayMetrics, Value]:
    store = MetricStore(GATEWAY_FAMILIES)
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tensorgate_{name}", labels)

    return GatewayMetrics(store.writer(0)), value


async def test_limit_counts_refusals_and_the_wait(
    metrics_and_value: tuple[GatewayMetrics, Value],
) -> None:
    metrics, value = metrics_and_value
    limit = ConcurrencyLimit("it", 1, 1, 0.02, LimitMetrics(metrics.writer, "u"))
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


def test_memory_budget_counts_refusals(metrics_and_value: tuple[GatewayMetrics, Value]) -> None:
    metrics, value = metrics_and_value
    budget = MemoryBudget(1000, metrics.memory_refusals("memory"))
    with budget.reserve() as reservation, pytest.raises(GatewayError):
        reservation.resize(1001)
    with pytest.raises(GatewayError):
        budget.check_admission()
    assert value("refusals_total", limit="memory", upstream="") == 2


def test_results_are_shown_before_there_are_any(
    metrics_and_value: tuple[GatewayMetrics, Value],
) -> None:
    """So that a rate over the first ones is right."""
    metrics, value = metrics_and_value
    metrics.mirror("r", "m")
    OffloadMetrics(metrics.writer)
    assert value("mirror_requests_total", route="r", upstream="m", result="failed") == 0
    assert value("offload_jobs_total", result="local") == 0


def test_endpoint_failures_and_ejections_are_counted(
    metrics_and_value: tuple[GatewayMetrics, Value],
) -> None:
    metrics, value = metrics_and_value
    labels = {"upstream": "u", "endpoint": "http://h:1"}
    for kind in ("5xx", "unreachable", "5xx"):
        metrics.count_failure("u", "http://h:1", kind)
    metrics.count_ejection("u", "http://h:1")
    assert value("endpoint_failures_total", **labels, kind="5xx") == 2
    assert value("endpoint_failures_total", **labels, kind="unreachable") == 1
    assert value("ejections_total", **labels) == 1


def test_supervisor_and_workers_count_reloads() -> None:
    store = MetricStore(GATEWAY_FAMILIES, 2)
    for segment in range(2):
        store.writer(segment).counter(RELOAD_FAILURES).add(1.0)
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))
    assert registry.get_sample_value("tensorgate_reload_failures_total") == 2
