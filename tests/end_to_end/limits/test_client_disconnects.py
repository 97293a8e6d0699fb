"""Client disconnects: the server is released at once, and nothing of the call remains."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.gateway import (
    RunningGateway,
    gateway_before,
    http1_connections,
    running_gateway,
    until,
)
from tests.support.http_messages import message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    binary_header,
    binary_response_header,
    infer_binary,
    infer_json,
)
from tests.support.raw_client import RawClient
from tests.support.servers.model_scripts import read_heads_only
from tests.support.servers.scripted_server import Connection, ScriptedServer, never_respond

BIG = 1_000_000
TENSOR = bytes(BIG)
GET = request("GET", "/v2/models/m/stats")
POST = request("POST", "/v2/x", TENSOR)
JSON = infer_json()
BINARY = infer_binary(binary_header(BIG), TENSOR)
Leave = Callable[[RawClient], Awaitable[None]]


async def closes(client: RawClient) -> None:
    await client.close()


async def resets(client: RawClient) -> None:
    client.reset()


async def half_closes(client: RawClient) -> None:
    # A half-closed connection counts as a disconnect: nothing else would show it.
    client.shutdown_write()


async def _let_go(*connections: Connection) -> None:
    """Wait until the gateway has left what its calls were waiting for."""
    async with asyncio.timeout(5):
        for connection in connections:
            if not connection.requests:
                await connection.left.wait()


WAYS: dict[str, Leave] = {"closes": closes, "resets": resets, "half-closes": half_closes}


@pytest.mark.parametrize("leave", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("data", [GET, JSON], ids=["GET", "json"])
async def test_client_disconnects_before_the_response(data: bytes, leave: Leave) -> None:
    async with gateway_before(read_heads_only) as (server, gateway), gateway.client() as client:
        await client.send(data)
        await until(lambda: gateway.outstanding == 1 and server.connections)
        await leave(client)
        await _let_go(*server.connections)
        await gateway.until_idle()


@pytest.mark.parametrize(("data", "leave"), [(BINARY, closes), (POST, resets), (POST, half_closes)])
async def test_client_disconnects_while_it_sends(data: bytes, leave: Leave) -> None:
    async with ScriptedServer(read_heads_only) as server:
        async with running_gateway(server.url) as gateway, gateway.client() as client:
            await client.send(data[: len(data) // 2])
            await until(lambda: gateway.gateway.listener._active_calls)
            await asyncio.sleep(0.02)
            await leave(client)
            await _let_go(*server.connections)
            await gateway.until_idle()
        assert server.requests == []


ENDLESS_BINARY = message(
    "HTTP/1.1 200 OK",
    {HEADER_LENGTH: str(len(binary_response_header(400_000_000))), "Content-Length": "500000000"},
    binary_response_header(400_000_000),
)


async def endless(connection: Connection) -> None:
    """Respond with an endless body."""
    await connection.head()
    await connection.send(ENDLESS_BINARY)
    while True:
        await connection.send(bytes(10_000))


@pytest.mark.parametrize(("data", "leave"), [(GET, closes), (JSON, resets), (JSON, half_closes)])
async def test_client_disconnects_while_the_response_streams(data: bytes, leave: Leave) -> None:
    async with gateway_before(endless) as (server, gateway), gateway.client() as client:
        await client.send(data)
        assert (await client.head()).status == 200
        await client.reader.readexactly(100_000)
        await leave(client)
        await _let_go(await server.connection())
        await gateway.until_idle()


async def test_client_disconnects_while_the_gateway_connects(unused_backlog: str) -> None:
    async with running_gateway(unused_backlog) as gateway, gateway.client() as client:
        await client.send(JSON)
        await until(lambda: gateway.outstanding == 1)
        await client.close()
        await gateway.until_idle()


async def never_reads(connection: Connection) -> None:
    """Read nothing."""
    connection.stop_reading()
    await asyncio.sleep(60)


async def _fill(client: RawClient, gateway: RunningGateway, data: bytes = bytes(50_000)) -> None:
    """Send until the gateway stops reading, and all that was sent has left the client's host."""
    (connection,) = http1_connections(gateway.gateway.listener)
    seen = 0
    async with asyncio.timeout(20):
        while seen < 5 or client.unsent:  # several times: a single pause may be short
            seen = seen + 1 if connection.read_flow.paused else 0
            if not seen and not client.unsent:
                client.send_nowait(data)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("leave", WAYS.values(), ids=WAYS)
async def test_client_disconnects_while_its_upload_is_paused(leave: Leave) -> None:
    async with gateway_before(never_reads) as (_, gateway), gateway.client() as client:
        await client.send(request("POST", "/v2/x", headers={"Content-Length": "60000000"}))
        await _fill(client, gateway)
        assert gateway.outstanding == 1
        await leave(client)
        await until(lambda: not gateway.gateway.listener.connections)
        await gateway.until_idle()
        assert gateway.gateway.listener.buffers.total == 0


async def test_client_disconnects_while_many_of_its_requests_wait() -> None:
    async with gateway_before(never_respond) as (_, gateway), gateway.client() as client:
        await client.send(GET)
        await until(lambda: gateway.outstanding == 1)
        await _fill(client, gateway, GET * 500)
        await client.close()
        await gateway.until_idle()
        assert gateway.gateway.listener.buffers.total == 0
