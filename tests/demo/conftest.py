"""A demo server, and a client of it."""

import io
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import aiohttp
import pytest
from yarl import URL

from gateway.demo.server.server import DemoServer
from gateway.demo.server.wire import HEADER_LENGTH, encode


@pytest.fixture
async def server() -> AsyncIterator[DemoServer]:
    async with DemoServer(event_delay=0) as running:
        yield running


@pytest.fixture
async def client(server: DemoServer) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        yield session


@dataclass
class Reply:
    """A response, whole."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class Demo:
    """Sends requests to a demo server."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    async def infer(self, model: str, document: object, binary: bytes = b"") -> Reply:
        """Send a document, or a text, with the binary tensors behind it."""
        header = document if isinstance(document, bytes) else encode(document)
        headers = {HEADER_LENGTH: str(len(header))} if binary else {}
        return await self.send(model, headers, header + binary)

    async def send(self, model: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Send the body of an inference request."""
        return await self.call("POST", f"/v2/models/{model}/infer", body, headers)

    async def ask(self, method: str, path: str, document: object = None) -> Reply:
        """Send a document, if one is given."""
        return await self.call(method, path, b"" if document is None else encode(document))

    async def call(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a request to a path as it is."""
        url = URL(path, encoded=True)
        async with self._client.request(
            method, url, data=io.BytesIO(body) if body else None, headers=headers
        ) as response:
            return Reply(response.status, await response.read(), response.headers)


@pytest.fixture
def demo(client: aiohttp.ClientSession) -> Demo:
    return Demo(client)
