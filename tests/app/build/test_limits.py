"""Limits of calls and buffered bodies, and how they change with a reload."""

import pytest

from gateway.app.build.limits import SharedLimits, build_shared_limits
from gateway.errors import GatewayError
from gateway.observe.gateway_metrics import GATEWAY_FAMILIES, GatewayMetrics
from gateway.observe.metric_store import MetricStore
from gateway.settings.schema import Settings
from tests.support.gateway import split_limits

MIB = 2**20


def _limits(before: SharedLimits | None = None, **limits: object) -> SharedLimits:
    upstreams = {"u": {"endpoints": ["http://127.0.0.1:1"]}}
    settings = Settings.model_validate(
        {"workers": 2, "upstreams": upstreams, **split_limits(limits)}
    )
    metrics = GatewayMetrics(MetricStore(GATEWAY_FAMILIES).writer(0))
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
