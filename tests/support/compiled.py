"""Skips tests that need the sources of the gateway, where it is compiled.

The conftest of all tests imports the hooks.
"""

from __future__ import annotations

import pytest

from gateway.build_info import COMPILED

_REASON = "needs the sources: the gateway is compiled"

needs_source = pytest.mark.needs_source
"""Marks a test that replaces or extends what is compiled, or reads files of the sources."""


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    """Allow mypyc's ``await`` to throw in a way that Python 3.12 and newer deprecate."""
    if COMPILED:
        warning = r"the \(type, exc, tb\) signature of throw\(\) is deprecated"
        config.addinivalue_line("filterwarnings", f"ignore:{warning}:DeprecationWarning")


@pytest.hookimpl
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the marked tests."""
    if COMPILED:
        for item in items:
            if item.get_closest_marker(needs_source.name):
                item.add_marker(pytest.mark.skip(reason=_REASON))


def skip_if_compiled() -> None:
    """Skip the test of the calling fixture: see ``needs_source``."""
    if COMPILED:
        pytest.skip(_REASON)
