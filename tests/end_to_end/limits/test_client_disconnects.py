"""Client disconnects: the server is released at once, and nothing of the call remains."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from tests.support.gateway import RunningGateway, http1_connections, running_gateway, until
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response_header,
    infer_binary,
    infer_json,
    infer_raw,
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
RAW = infer_raw(TENSOR)
EVERY_KIND = {"GET": GET, "POST": POST, "json": JSON, "binary": BINARY, "raw": RAW}

Leave = Callable[[RawClient], Awaitable[None]]


async def closes(client: RawClient) -> None:
    await client.close()


async def resets(client: RawClient) -> None:
    client.reset()


async def half_closes(client: RawClient) -> None:
    # A half-closed connection counts as a disconnect: nothing else would show it.
    client.shutdown_write()


WAYS: dict[str, Leave] = {"closes": closes, "resets": resets, "half-closes": half_closes}


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "closes") for kind in EVERY_KIND), ("json", "resets"), ("json", "half-closes")],
)
async def test_client_disconnects_before_the_response(kind: str, way: str) -> None:
    data, leave = EVERY_KIND[kind], WAYS[way]
    async with (
        ScriptedServer(read_heads_only) as server,
        running_gateway(server.url) as gateway,
        gateway.client() as client,
    ):
        await client.send(data)
        await until(lambda: gateway.outstanding == 1 and server.connections)
        await leave(client)
        await _everyone_is_let_go(server)
        await gateway.until_idle()


@pytest.mark.parametrize(
    ("data", "way"),
    [
        (POST, "closes"),
        (BINARY, "closes"),
        (RAW, "closes"),
        (infer_json(b" " * BIG), "closes"),
        (POST, "resets"),
        (POST, "half-closes"),
    ],
)
async def test_client_disconnects_while_it_sends(data: bytes, way: str) -> None:
    leave = WAYS[way]
    async with ScriptedServer(read_heads_only) as server:
        async with running_gateway(server.url) as gateway, gateway.client() as client:
            await client.send(data[: len(data) // 2])
            await until(lambda: gateway.gateway.listener._active_calls)
            await asyncio.sleep(0.02)
            await leave(client)
            await _everyone_is_let_go(server)
            await gateway.until_idle()
        assert server.requests == []


async def _everyone_is_let_go(server: ScriptedServer) -> None:
    async with asyncio.timeout(5):
        for connection in server.connections:
            if not connection.requests:
                await connection.left.wait()


ENDLESS_BINARY = message(
    "HTTP/1.1 200 OK",
    {HEADER_LENGTH: str(len(binary_response_header(400_000_000))), "Content-Length": "500000000"},
    binary_response_header(400_000_000),
)


async def endless(connection: Connection) -> None:
    """Respond with an endless body."""
    await connection.request()
    await connection.send(ENDLESS_BINARY)
    while True:
        await connection.send(bytes(10_000))


@pytest.mark.parametrize(
    ("data", "leave"), [(GET, closes), (JSON, closes), (JSON, resets), (JSON, half_closes)]
)
async def test_client_disconnects_while_the_response_streams(data: bytes, leave: Leave) -> None:
    async with (
        ScriptedServer(endless) as server,
        running_gateway(server.url) as gateway,
        gateway.client() as client,
    ):
        await client.send(data)
        assert (await client.head()).status == 200
        await client.reader.readexactly(100_000)
        await leave(client)
        await _until_disconnect(await server.connection())
        await gateway.until_idle()


async def _until_disconnect(connection: Connection) -> None:
    async with asyncio.timeout(5):
        await connection.left.wait()


async def test_client_disconnects_between_events() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        head = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
        await connection.send(message("HTTP/1.1 200 OK", head, chunk(b"data: 1\n\n")))
        await never_respond(connection)

    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url) as gateway,
        gateway.client() as client,
    ):
        await client.send(request("POST", "/v2/models/m/generate_stream", b"{}"))
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"
        await client.close()
        await _until_disconnect(await server.connection())
        await gateway.until_idle()


async def test_client_disconnects_while_the_gateway_connects(unused_backlog: str) -> None:
    async with running_gateway(unused_backlog) as gateway, gateway.client() as client:
        await client.send(JSON)
        await until(lambda: gateway.outstanding == 1)
        await client.close()
        await gateway.until_idle()


async def test_client_disconnects_within_its_head() -> None:
    for data in (b"", b"GET /v2", b"GET /v2 HTTP/1.1\r\nHost: x\r\n"):
        async with ScriptedServer() as server, running_gateway(server.url) as gateway:
            async with gateway.client() as client:
                await client.send(data)
                await asyncio.sleep(0.01)
            assert not server.connections


async def test_client_disconnects_with_pipelined_requests() -> None:
    async with ScriptedServer(never_respond) as server:
        async with running_gateway(server.url) as gateway, gateway.client() as client:
            await client.send(GET * 10)
            # The call starts before the server has accepted its connection.
            await until(lambda: gateway.outstanding == 1 and bool(server.connections))
            await client.close()
            await gateway.until_idle()
        assert len(server.connections) == 1


async def test_hundred_clients_disconnect_at_once() -> None:
    async with ScriptedServer(never_respond) as server, running_gateway(server.url) as gateway:
        async with AsyncExitStack() as clients:
            for number in range(100):
                client = await clients.enter_async_context(gateway.client())
                await client.send((GET, JSON, POST[:-1])[number % 3])
            await until(lambda: gateway.outstanding == 100)
        await gateway.until_idle()
        await _everyone_is_let_go(server)


async def test_client_is_served_after_others_disconnected() -> None:
    async def script(connection: Connection) -> None:
        received = await connection.request()
        if received.head.target == INFER:
            await connection.send(http_response(b'{"outputs":[]}'))
        else:
            await never_respond(connection)

    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url) as gateway,
        gateway.client() as staying,
    ):
        for _ in range(5):
            async with gateway.client() as leaving:
                await leaving.send(GET)
                await until(lambda: gateway.outstanding == 1)
            await gateway.until_idle()
            assert (await staying.ask(JSON)).status == 200


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
    async with (
        ScriptedServer(never_reads) as server,
        running_gateway(server.url) as gateway,
        gateway.client() as client,
    ):
        await client.send(request("POST", "/v2/x", headers={"Content-Length": "60000000"}))
        await _fill(client, gateway)
        assert gateway.outstanding == 1
        await leave(client)
        await until(lambda: not gateway.gateway.listener.connections)
        await gateway.until_idle()
        assert gateway.gateway.listener.buffers.total == 0


async def test_client_disconnects_while_many_of_its_requests_wait() -> None:
    async with (
        ScriptedServer(never_respond) as server,
        running_gateway(server.url) as gateway,
        gateway.client() as client,
    ):
        await client.send(GET)
        await until(lambda: gateway.outstanding == 1)
        await _fill(client, gateway, GET * 500)
        await client.close()
        await gateway.until_idle()
        assert gateway.gateway.listener.buffers.total == 0
