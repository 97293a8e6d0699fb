import pytest

from tests.support.event_loops import LoopFactories, both_loops, product_loop

_LONG = ("test_resource_release.py", "test_limits.py")
"""Files whose tests take long; those of disconnects and sizes show the same transports."""


@pytest.hookimpl
def pytest_asyncio_loop_factories(item: pytest.Item) -> LoopFactories:
    """Run tests on both loops, whose transports differ in how they pause, drop and close."""
    return product_loop() if item.path.name in _LONG else both_loops()
