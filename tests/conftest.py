"""What holds for all tests."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# The same examples in each run, however slow the machine is: a test fails for a change, or never.
settings.register_profile(
    "steady",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("steady")


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Has one process run all tests against real servers, which are started once."""

    def _split_scope(self, nodeid: str) -> str:
        return "integration" if nodeid.startswith("tests/integration/") else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    """Say which process runs what, where several run tests."""
    return _Scheduling(config, log)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name what is no text by its place: where several processes run tests, all must agree.

    What gzip gives holds the time at which it did.
    """
    return argname if isinstance(val, bytes) and not val.decode("latin-1").isprintable() else None


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at all tests again and again: each would be a long stop."""
    gc.collect()
    gc.freeze()
