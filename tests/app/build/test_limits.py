"""What counts exchanges and bodies, and goes on with other settings."""

import pytest

from gateway.app.build.limits import SharedLimits, shared_limits
from gateway.errors import GatewayError
from gateway.settings.schema import Settings
from tests.support.gateway import split_limits

MIB = 2**20


def _limits(before: SharedLimits | None = None, **limits: object) -> SharedLimits:
    upstreams = {"u": {"endpoints": ["http://127.0.0.1:1"]}}
    settings = Settings.model_validate(
        {"workers": 2, "upstreams": upstreams, **split_limits(limits)}
    )
    return shared_limits(settings, before)


def test_each_worker_has_its_part() -> None:
    limits = _limits(max_buffered_bytes="8MiB", max_requests=4)
    with limits.held.reserve() as held, limits.copied.reserve() as copied:
        held.resize(4 * MIB)
        copied.resize(1 * MIB)
        for each in (held, copied):
            with pytest.raises(GatewayError):
                each.grow(1)
    assert limits.concurrency_limit is not None
    assert [limits.concurrency_limit.try_acquire() for _ in range(3)] == [True, True, False]


def test_bodies_go_on_counting() -> None:
    before = _limits(max_buffered_bytes="8MiB")
    with before.held.reserve() as held, before.copied.reserve() as copied:
        held.resize(3 * MIB)
        copied.resize(1 * MIB)
        after = _limits(before, max_buffered_bytes="16MiB")
        with pytest.raises(GatewayError):
            held.resize(5 * MIB)  # until the new ones are used
        after.apply()
        with after.held.reserve() as more_held, after.copied.reserve() as more_copied:
            more_held.resize(5 * MIB)
            more_copied.resize(1 * MIB)
            for each in (more_held, more_copied):
                with pytest.raises(GatewayError):
                    each.grow(1)


def test_requests_go_on_counting() -> None:
    before = _limits(max_requests=4)
    assert before.concurrency_limit is not None
    assert before.concurrency_limit.try_acquire()
    after = _limits(before, max_requests=6, drain_timeout=1)
    after.apply()
    assert after.concurrency_limit is not None
    assert [after.concurrency_limit.try_acquire() for _ in range(3)] == [True, True, False]


def test_a_limit_comes_and_goes() -> None:
    unlimited = _limits(_limits(max_requests=4))
    unlimited.apply()
    assert unlimited.concurrency_limit is None
    limited = _limits(unlimited, max_requests=2)
    limited.apply()
    assert limited.concurrency_limit is not None
    assert [limited.concurrency_limit.try_acquire() for _ in range(2)] == [True, False]
