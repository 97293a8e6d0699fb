from collections.abc import AsyncIterator

import aiohttp
import pytest

from gateway.demo.server.server import DemoServer


@pytest.fixture
async def server() -> AsyncIterator[DemoServer]:
    async with DemoServer(event_delay=0) as running:
        yield running


@pytest.fixture
async def client(server: DemoServer) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        yield session
