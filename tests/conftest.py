"""What holds for all tests."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in each run, however slow the machine is: a test fails for a change, or never.
settings.register_profile(
    "steady",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("steady")

_INTEGRATION = Path(__file__).parent / "integration"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one process run all tests against the real Triton, where several run tests."""
    for item in items:
        if item.path.is_relative_to(_INTEGRATION):
            item.add_marker(pytest.mark.xdist_group("integration"))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name what is no text by its place: where several processes run tests, all must agree.

    What gzip gives holds the time at which it did.
    """
    return argname if isinstance(val, bytes) and not val.decode("latin-1").isprintable() else None


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at all tests again and again: each would be a long stop."""
    gc.collect()
    gc.freeze()
