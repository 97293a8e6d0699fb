"""Limits, their shares of workers, the number of these, and declared models."""

import os
from pathlib import Path

import pytest

from gateway.app.build.limits import SharedLimits, build_shared_limits
from gateway.app.build.routes import declared_models
from gateway.app.build.worker_count import (
    offload_threads,
    offload_warnings,
    usable_cores,
    worker_count,
)
from gateway.app.preflight.settings_checks import settings_warnings
from gateway.errors import GatewayError
from gateway.observe import families
from gateway.observe.gateway_metrics import GatewayMetrics
from gateway.observe.metric_store import MetricStore
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.settings.models import Model
from gateway.settings.schema import Settings
from tests.support.gateway import split_limits

MIB = 2**20


def _limits(before: SharedLimits | None = None, **limits: object) -> SharedLimits:
    upstreams = {"u": {"endpoints": ["http://127.0.0.1:1"]}}
    settings = Settings.model_validate(
        {"workers": 2, "upstreams": upstreams, **split_limits(limits)}
    )
    metrics = GatewayMetrics(MetricStore(families.FAMILIES).writer(0))
    return build_shared_limits(settings, metrics, before)


def test_workers_share_the_limits_equally() -> None:
    limits = _limits(max_buffered_bytes="8MiB", max_requests=4)
    with limits.memory_budget.reserve() as body, limits.mirror_memory_budget.reserve() as copy:
        body.resize(4 * MIB)
        copy.resize(1 * MIB)
        for each in (body, copy):
            with pytest.raises(GatewayError):
                each.grow(1)
    assert limits.concurrency_limit is not None
    assert [limits.concurrency_limit.try_acquire() for _ in range(3)] == [True, True, False]


def test_buffered_bytes_count_on_through_a_reload() -> None:
    before = _limits(max_buffered_bytes="8MiB")
    with before.memory_budget.reserve() as body, before.mirror_memory_budget.reserve() as copy:
        body.resize(3 * MIB)
        copy.resize(1 * MIB)
        after = _limits(before, max_buffered_bytes="16MiB")
        with pytest.raises(GatewayError):
            body.resize(5 * MIB)  # the new limit is not applied yet
        after.apply()
        with (
            after.memory_budget.reserve() as next_body,
            after.mirror_memory_budget.reserve() as next_copy,
        ):
            next_body.resize(5 * MIB)
            next_copy.resize(1 * MIB)
            for each in (next_body, next_copy):
                with pytest.raises(GatewayError):
                    each.grow(1)


def test_reload_adds_and_removes_a_limit() -> None:
    unlimited = _limits(_limits(max_requests=4))
    unlimited.apply()
    assert unlimited.concurrency_limit is None
    limited = _limits(unlimited, max_requests=2)
    limited.apply()
    assert limited.concurrency_limit is not None
    assert [limited.concurrency_limit.try_acquire() for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("limit", "shared", "warns"),
    [
        # 2 × (160 MiB + 3 × 100 MiB) + 1.25 × 1 GiB
        (2200 * MIB, {"size": "100MiB"}, False),
        (2199 * MIB, {"size": "100MiB"}, True),
        (0, "auto", False),
        ("max", {"size": "1TiB"}, False),
        (None, {"size": "1TiB"}, False),
    ],
)
def test_size_of_shared_memory_with_which_the_container_is_too_small_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: object, shared: object, warns: bool
) -> None:
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(f"{limit}\n")
    monkeypatch.setattr("gateway.app.build.limits.MEMORY_LIMIT", file)
    upstream = {"endpoints": [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]}
    upstreams = {"t": {**upstream, "shared_memory": shared}}
    settings = Settings.model_validate({"workers": 2, "upstreams": upstreams})
    text = "with it, the gateway may take 2200 MiB, and its container has 2199 MiB: docs/memory.md"
    expected = [(("upstreams", "t", "shared_memory", "size"), text)] * warns
    assert list(settings_warnings(settings)) == expected


def _settings(**more: object) -> Settings:
    return Settings.model_validate({"upstreams": {"u": {"endpoints": ["http://a:1"]}}, **more})


@pytest.mark.parametrize(("workers", "count"), [(3, 3), ("auto", 4)])
def test_worker_count_is_the_setting_or_the_cores(
    monkeypatch: pytest.MonkeyPatch, workers: int | str, count: int
) -> None:
    monkeypatch.setattr("gateway.app.build.worker_count.usable_cores", lambda: 4)
    assert worker_count(_settings(workers=workers)) == count


@pytest.mark.parametrize(
    ("cores", "workers", "offload", "threads"),
    [
        (1, 1, "auto", 0),
        (2, 1, "auto", 1),
        (64, 1, "auto", 4),
        (4, 5, "auto", 0),
        (4, "auto", 2, 2),
        (64, 1, 0, 0),
    ],
)
def test_threads_are_a_worker_s_share_of_spare_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int | str, offload: object, threads: int
) -> None:
    monkeypatch.setattr("gateway.app.build.worker_count.usable_cores", lambda: cores)
    monkeypatch.setattr("gateway.app.build.worker_count.NATIVE", True)
    assert offload_threads(_settings(workers=workers, offload=offload)) == threads


@pytest.mark.parametrize(("offload", "warns"), [("auto", False), (0, False), (4, True)])
def test_there_are_no_threads_without_the_c_module(
    monkeypatch: pytest.MonkeyPatch, offload: object, warns: bool
) -> None:
    monkeypatch.setattr("gateway.app.build.worker_count.NATIVE", False)
    assert offload_threads(_settings(offload=offload)) == 0
    warnings = [why for _, why in offload_warnings(_settings(offload=offload))]
    assert any("not compiled" in why for why in warnings) is warns


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        (None, 8),
        ("1600000 100000\n", 8),
        ("150000 100000\n", 2),
        ("1000 100000\n", 1),
        ("max 100000\n", 8),
    ],
)
def test_cpu_quota_counts_as_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    path = tmp_path / "cpu.max"
    if quota is not None:
        path.write_text(quota)
    assert usable_cores(path) == cores


def test_batch_dimension_comes_first() -> None:
    x = {"name": "x", "datatype": "FP32", "shape": [3, -1]}
    y = {"name": "y", "datatype": "BYTES", "shape": []}
    for more, batch in ({}, ()), ({"max_batch_size": 8}, (-1,)):
        declared = {"m": Model.model_validate({"inputs": [x], "outputs": [y], **more})}
        inputs = (TensorSpec("x", DATATYPES["FP32"], (*batch, 3, -1)),)
        outputs = (TensorSpec("y", DATATYPES["BYTES"], batch),)
        metadata = ModelMetadata("m", inputs, bool(batch), outputs)
        built = DeclaredModel(metadata, more.get("max_batch_size", 0))
        assert declared_models(declared) == {"m": built}
