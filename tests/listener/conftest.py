from tests.servers.loops import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories
from tests.servers.ways import went_straight as went_straight
