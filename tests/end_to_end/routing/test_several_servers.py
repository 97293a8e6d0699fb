"""Several servers behind one gateway: broadcasts, merged responses, and health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from gateway.demo.server.server import DemoServer
from tests.support.addresses import free_address
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.http_messages import http_response, request
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
)

LOAD = "/v2/repository/models/m/load"
INDEX = "/v2/repository/index"
READY = "/v2/health/ready"


def gateway_to(
    *, routes: Sequence[dict[str, Any]] = (), **upstreams: Sequence[str]
) -> AbstractAsyncContextManager[RunningGateway]:
    """Run a gateway in front of upstreams; without ``routes`` one route leads to all."""
    shares = [{"name": name, "weight": 1} for name in upstreams]
    general = {
        "upstreams": {
            name: {"endpoints": list(urls), "dialect": "triton"} for name, urls in upstreams.items()
        },
        "routes": list(routes) or [{"upstream": shares}],
    }
    return running_gateway(general=general)


@asynccontextmanager
async def client_to(
    *, routes: Sequence[dict[str, Any]] = (), **upstreams: Sequence[str]
) -> AsyncIterator[RawClient]:
    """Run such a gateway; yield a connection to it."""
    async with gateway_to(routes=routes, **upstreams) as gateway, gateway.client() as client:
        yield client


@asynccontextmanager
async def servers_of(*scripts: Script) -> AsyncIterator[list[ScriptedServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ScriptedServer(script)) for script in scripts]


async def _hangs(connection: Connection) -> None:
    """Read a request, and never respond."""
    await connection.request()
    await connection.wait_for_close()


WORKS = always_respond(http_response(b""))


# --------------------------------------------------------------------------------------- broadcasts


async def test_client_disconnect_during_a_broadcast_frees_everything() -> None:
    async with (
        servers_of(WORKS, never_respond, _hangs) as servers,
        gateway_to(main=[server.url for server in servers]) as gateway,
        gateway.client() as client,
    ):
        await client.send(request("POST", LOAD, bytes(100_000)))
        await until(lambda: servers[2].requests and gateway.outstanding == 2)
        assert servers[0].requests
        await client.close()
        for server in servers[1:]:
            async with asyncio.timeout(5):
                await (await server.connection()).left.wait()
        await gateway.until_idle()


# ------------------------------------------------------------------------------------- demo servers


@asynccontextmanager
async def _demo_servers(count: int) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        yield [(await stack.enter_async_context(DemoServer())).url for _ in range(count)]


async def test_index_and_statistics_are_those_of_all() -> None:
    async with _demo_servers(3) as urls:
        routes = [
            {"match": {"model": "identity_fp16"}, "upstream": "one"},
            {"match": {"operations": ["repository", "statistics", "metadata"]}, "upstream": "two"},
        ]
        async with client_to(routes=routes, one=urls[:1], two=urls[1:]) as client:
            unload = "/v2/repository/models/identity_fp16/unload"
            assert (await client.call("POST", unload)).status == 200
            reply = await client.call("POST", INDEX, b'{"ready": true}')
            names = {name: set[str]() for name in ("one", "two")}
            for entry in reply.json:
                names[entry["upstream"]].add(entry["name"])
                assert entry["state"] == "READY"
            assert names["two"] - names["one"] == {"identity_fp16"}
            stats = (await client.call("GET", "/v2/models/stats")).json["model_stats"]
            sources = {(entry["upstream"], entry["endpoint"]) for entry in stats}
            assert sources == {("one", urls[0]), ("two", urls[1]), ("two", urls[2])}
            extensions = (await client.call("GET", "/v2")).json["extensions"]
            assert "binary_tensor_data" in extensions


# ------------------------------------------------------------------------------------------- health


async def test_health_of_the_gateway_depends_on_its_upstreams() -> None:
    down = f"http://{free_address()}"
    async with servers_of(
        WORKS, always_respond(http_response(b"no", status="400 Bad Request"))
    ) as servers:
        ready, unready = (server.url for server in servers)
        async with client_to(main=[down, ready], canary=[ready]) as client:
            for path, body in ((READY, b'{"ready":true}'), ("/v2/health/live", b'{"live":true}')):
                reply = await client.call("GET", path)
                assert (reply.status, reply.body) == (200, body)
                await client.send(request("HEAD", path))
                head = await client.head()
                assert (head.status, head.get("Content-Length")) == (200, str(len(body)))
        async with client_to(main=[ready], canary=[down, unready]) as client:
            reply = await client.call("GET", READY)
            assert reply.status == 503
            assert reply.error == "not ready: upstream canary"
            # A response to HEAD has no body: it would be taken for the next response.
            await client.send(request("HEAD", READY))
            assert (await client.head()).status == 503
            assert (await client.call("GET", "/v2/health/live")).status == 200


async def test_connection_of_a_readiness_check_is_kept() -> None:
    """Even if the server sends a body with its 200."""
    async with ScriptedServer(always_respond(http_response(b'{"ready":true}'))) as server:
        async with client_to(main=[server.url]) as client:
            assert (await client.call("GET", READY)).status == 200
            assert (await client.call("GET", "/v2/models/m/ready")).json == {"ready": True}
        assert len(server.connections) == 1
