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
from tests.support.servers.scripted_server import (
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
)
from tests.support.servers.served import served

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
async def servers_of(*scripts: Script) -> AsyncIterator[list[ScriptedServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ScriptedServer(script)) for script in scripts]


WORKS = always_respond(http_response(b""))


async def test_client_disconnect_during_a_broadcast_frees_everything() -> None:
    async with (
        servers_of(WORKS, never_respond, never_respond) as servers,
        gateway_to(main=[server.url for server in servers]) as gateway,
        gateway.client() as client,
    ):
        await client.send(request("POST", LOAD, bytes(100_000)))
        await until(lambda: servers[0].requests and gateway.outstanding == 2)
        await client.close()
        for server in servers[1:]:
            async with asyncio.timeout(5):
                await (await server.connection()).left.wait()
        await gateway.until_idle()


async def test_index_and_statistics_are_those_of_all() -> None:
    async with DemoServer() as one, DemoServer() as two, DemoServer() as three:
        urls = [one.url, two.url, three.url]
        routes = [
            {"match": {"model": "identity_fp16"}, "upstream": "one"},
            {"match": {"operations": ["repository", "statistics", "metadata"]}, "upstream": "two"},
        ]
        async with (
            gateway_to(routes=routes, one=urls[:1], two=urls[1:]) as gateway,
            gateway.client() as client,
        ):
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


async def test_health_of_the_gateway_depends_on_its_upstreams() -> None:
    down = f"http://{free_address()}"
    async with servers_of(
        WORKS, always_respond(http_response(b"no", status="400 Bad Request"))
    ) as servers:
        ready, unready = (server.url for server in servers)
        async with (
            gateway_to(main=[down, ready], canary=[ready]) as gateway,
            gateway.client() as client,
        ):
            for path, body in ((READY, b'{"ready":true}'), ("/v2/health/live", b'{"live":true}')):
                reply = await client.call("GET", path)
                assert (reply.status, reply.body) == (200, body)
                await client.send(request("HEAD", path))
                head = await client.head()
                assert (head.status, head.get("Content-Length")) == (200, str(len(body)))
        async with (
            gateway_to(main=[ready], canary=[down, unready]) as gateway,
            gateway.client() as client,
        ):
            reply = await client.call("GET", READY)
            assert reply.status == 503
            assert reply.error == "not ready: upstream canary"
            # A response to HEAD has no body: it would be taken for the next response.
            await client.send(request("HEAD", READY))
            assert (await client.head()).status == 503
            assert (await client.call("GET", "/v2/health/live")).status == 200


async def test_connection_of_a_readiness_check_is_kept() -> None:
    """Even if the server sends a body with its 200."""
    async with served(always_respond(http_response(b'{"ready":true}'))) as (server, _, client):
        assert (await client.call("GET", READY)).status == 200
        assert (await client.call("GET", "/v2/models/m/ready")).json == {"ready": True}
        assert len(server.connections) == 1
