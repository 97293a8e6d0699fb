"""Settings of pytest and Hypothesis for all tests."""

from __future__ import annotations

import gc
import signal
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.support.compiled import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.support.compiled import pytest_configure as pytest_configure
from tests.support.scale import scaled

# Each run tries the same examples, however slow the machine: only a change can fail a test.
settings.register_profile(
    "steady",
    max_examples=scaled(100),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("steady")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what runs in its background ignore Ctrl-C, and all processes of tests would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_TOGETHER = (
    "tests/integration/",
    "tests/interop/early_errors/",
    "tests/interop/grpc/",
    "tests/interop/test_",
    "tests/deploy/test_dockerfile.py",
    "tests/test_architecture.py",
)
"""Tests that share what takes long to start or to build: one process runs them."""


_TESTS_BETWEEN_EXEMPTIONS = 100


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Runs those tests in one process each, and every other test wherever there is time."""

    def _split_scope(self, nodeid: str) -> str:
        return next((each for each in _TOGETHER if nodeid.startswith(each)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    """Return the scheduler that assigns tests to processes."""
    return _Scheduling(config, log)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name unprintable bytes by their parameter, so that all processes collect the same names.

    The output of gzip holds the current time.
    """
    return argname if isinstance(val, bytes) and not val.decode("latin-1").isprintable() else None


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection, which would take long each time."""
    _exempt_from_garbage_collection()


_started = count(1)


def pytest_runtest_logstart() -> None:
    """Exempt what earlier tests left, too: each test that collects garbage would take longer."""
    if next(_started) % _TESTS_BETWEEN_EXEMPTIONS == 0:
        _exempt_from_garbage_collection()


def _exempt_from_garbage_collection() -> None:
    gc.collect()
    gc.freeze()
