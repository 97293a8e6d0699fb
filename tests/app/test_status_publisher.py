"""The admin process knows the status of all living workers."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.app import status_publisher
from gateway.app.shared_memory import SharedMemory
from gateway.app.status_publisher import (
    LAGS_FROM,
    MEASUREMENTS,
    WELL_BELOW,
    EventLoopWatch,
    StatusPublisher,
)
from gateway.observe.gateway_metrics import GatewayMetrics
from gateway.observe.metrics import StoreCollector
from gateway.workers.shared_records import SharedDocuments
from tests.support.gateway import until


def _nothing() -> None: ...


def _publisher(
    shared: SharedMemory,
    status: Callable[[bool], dict[str, Any]] = lambda _: {},
    tick: Callable[[], None] = _nothing,
    documents: SharedDocuments | None = None,
) -> StatusPublisher:
    """Make the publisher of the first worker, whose status has no upstreams."""

    def complete(with_models: bool) -> dict[str, Any]:
        return {"pid": os.getpid(), "upstreams": {}} | status(with_models)

    metrics = GatewayMetrics(shared.metric_store.writer(0))
    shown = documents or shared.statuses
    return StatusPublisher(shown, 0, complete, metrics, tick, _nothing)


def _value(shared: SharedMemory, name: str) -> float:
    registry = CollectorRegistry()
    registry.register(StoreCollector(shared.metric_store))
    return registry.get_sample_value(name) or 0.0


def test_oldest_call_that_waits_in_any_worker_that_runs_is_known() -> None:
    shared = SharedMemory.for_workers(3)
    one, two = ("u", "http://h:1", "m"), ("u", "http://h:2", "m")
    shared.waiting.publish(0, 100.0, {one: 90.0, two: 91.0})
    shared.waiting.publish(1, 101.0, {one: 80.0})
    shared.waiting.publish(2, 90.0, {two: 20.0})
    assert shared.waiting.read(102.0) == {one: 80.0, two: 91.0}
    shared.waiting.publish(1, 102.0, {})
    assert shared.waiting.read(102.0) == {one: 90.0, two: 91.0}
    assert shared.waiting.read(107.0) == {}


def test_calls_that_wait_are_shared_of_the_endpoints_that_make_them_wait_longest() -> None:
    shared = SharedMemory.for_workers(1)
    waiting = {("\udc80" * 300, f"http://h:{n}", "模" * 300): 100.0 - n for n in range(500)}
    shared.waiting.publish(0, 100.0, waiting)
    found = shared.waiting.read(100.0)
    assert {url for _, url, _ in found} == {f"http://h:{n}" for n in range(400, 500)}


async def test_status_is_published_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_publisher, "LAG_INTERVAL", 0.001)
    shared = SharedMemory.for_workers(2)
    calls: list[None] = []

    def status(with_models: bool) -> dict[str, Any]:
        calls.append(None)
        return {"number": len(calls)}

    async with _publisher(shared, status):
        await until(lambda: len(calls) >= 3)
    assert _value(shared, "tensorgate_event_loop_lag_seconds_count") >= 8


async def test_event_loop_that_is_held_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_publisher, "LAG_INTERVAL", 0.01)
    shared = SharedMemory.for_workers(2)
    async with _publisher(shared):
        await until(lambda: _value(shared, "tensorgate_event_loop_lag_seconds_count"))
        for _ in range(3):  # one may fall between two measurements
            time.sleep(0.2)  # noqa: ASYNC251  # as a conversion without an end would
            await asyncio.sleep(0.02)
    assert _value(shared, "tensorgate_event_loop_lag_seconds_sum") > 0.1


async def test_status_that_is_too_long_is_shared_without_models(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    shared = SharedMemory.for_workers(2)
    documents = SharedDocuments(2, max_document=1024)

    def status(with_models: bool) -> dict[str, Any]:
        return {"models": "x" * 2000 if with_models else None}

    async with _publisher(shared, status, documents=documents):
        await until(lambda: documents.read_all()[0])
    assert json.loads(documents.read_all()[0])["models"] is None
    assert caplog.messages == ["the lists of models are too long for workers to share them"]


async def test_update_or_status_that_fails_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(status_publisher, "LAG_INTERVAL", 0.001)
    shared = SharedMemory.for_workers(2)
    calls: list[bool] = []
    ticks: list[None] = []

    def status(with_models: bool) -> dict[str, Any]:
        calls.append(with_models)
        return {"name": "\udcff" if len(calls) == 1 else "good"}

    def tick() -> None:
        ticks.append(None)
        raise ZeroDivisionError("a bug")

    async with _publisher(shared, status, tick):
        await until(lambda: shared.statuses.read_all()[0] and len(ticks) > 5)
    assert "the status could not be published" in caplog.messages
    assert "a bug" in caplog.text


async def test_worker_that_is_alone_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_publisher, "LAG_INTERVAL", 0.001)
    shared = SharedMemory.for_workers(1)
    async with _publisher(shared):
        await until(lambda: _value(shared, "tensorgate_event_loop_lag_seconds_count") >= 8)
        assert shared.statuses.read_all() == [b""]


def _observe(watch: EventLoopWatch, lag: float, times: int = MEASUREMENTS) -> None:
    for _ in range(times):
        watch.observe(lag)


def test_event_loop_that_lags_is_named_until_it_is_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tensorgate")
    watch = EventLoopWatch()
    _observe(watch, LAGS_FROM * 1.4)
    found = watch.describe()
    assert found is not None
    assert found["text"].startswith("lags by 140 ms and uses ")
    since = found["since"]
    _observe(watch, WELL_BELOW)
    found = watch.describe()
    assert found is not None
    assert found["since"] == since
    assert found["text"].startswith("lags by 50 ms")
    _observe(watch, WELL_BELOW / 2)
    assert watch.describe() is None
    first, last = caplog.messages
    assert first.startswith("the event loop lags by 140 ms and uses ")
    assert last == "the event loop lags no more"


def test_long_pause_is_no_lag(caplog: pytest.LogCaptureFixture) -> None:
    watch = EventLoopWatch()
    _observe(watch, 0.001)
    _observe(watch, 20.0, MEASUREMENTS // 2 - 1)
    assert watch.describe() is None
    assert not caplog.messages
