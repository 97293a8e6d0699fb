"""Health checks, DNS and model discovery while a gateway serves clients."""

import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.app.build import upstreams
from gateway.demo.server.server import DemoServer
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import INFER, json_request
from tests.support.raw_client import connect
from tests.support.servers.name_service import NameService
from tests.support.servers.scripted_server import Connection, ScriptedServer

GET = request("GET", "/v2/models/m")
POST = request("POST", INFER, json_request())
ILL = http_response(status="503 Service Unavailable")


async def _names(gateway: RunningGateway, data: bytes = GET) -> list[str]:
    """Return the servers that respond to the next requests of one client."""
    async with gateway.client() as client:
        replies = [await client.ask(data) for _ in range(6)]
    return [reply.json["name"] if reply.status == 200 else reply.error for reply in replies]


class NamedServer:
    """Responds to health checks as the test says, and to all else with its name."""

    def __init__(self, name: str) -> None:
        self.is_well = True
        self._response = http_response(json.dumps({"name": name, "outputs": []}).encode())

    async def __call__(self, connection: Connection) -> None:
        while True:
            received = await connection.request()
            if received.head.target != "/v2/health/ready":
                await connection.send(self._response)
            else:
                await connection.send(http_response() if self.is_well else ILL)


HEALTH: dict[str, Any] = {"health_check": {"interval": "10ms", "timeout": "5s"}}


async def test_unhealthy_endpoint_gets_no_requests_until_it_recovers() -> None:
    well, other = NamedServer("a"), NamedServer("b")
    async with (
        ScriptedServer(well) as a,
        ScriptedServer(other) as b,
        running_gateway(a.url, b.url, upstream=HEALTH) as gateway,
    ):
        pool = gateway.pool
        await until(lambda: all(state.healthy for state in pool.snapshot()))
        assert set(await _names(gateway)) == {"a", "b"}
        well.is_well = False
        await until(lambda: pool.snapshot()[0].healthy is False)
        assert set(await _names(gateway)) == set(await _names(gateway, POST)) == {"b"}
        assert pool.any_healthy
        other.is_well = False
        await until(lambda: not pool.any_healthy)
        # All are ejected: a call may still succeed.
        assert set(await _names(gateway)) == {"a", "b"}
        well.is_well = True
        await until(lambda: pool.any_healthy)
        assert set(await _names(gateway)) == {"a"}


RESOLVE: dict[str, Any] = {"dns_refresh": "10ms"}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> NameService:
    """The gateway's name service."""
    service = NameService(triton=["127.0.0.1"])
    monkeypatch.setattr(upstreams, "resolve_host", service)
    return service


async def test_dns_changes_add_and_remove_endpoints(names: NameService) -> None:
    async with ScriptedServer(NamedServer("a")) as a:
        name = f"triton:{a.port}"
        async with (
            ScriptedServer(NamedServer("b"), host="127.0.0.2", port=a.port) as b,
            running_gateway(f"http://{name}", upstream=RESOLVE) as gateway,
        ):
            assert await _names(gateway) == ["a"] * 6
            names.answers["triton"] = ["127.0.0.1", "127.0.0.2"]
            await until(lambda: len(gateway.pool.endpoints) == 2)
            assert set(await _names(gateway)) == set(await _names(gateway, POST)) == {"a", "b"}
            names.answers["triton"] = ["127.0.0.2"]
            await until(lambda: len(gateway.pool.endpoints) == 1)
            assert await _names(gateway) == ["b"] * 6
            await until(lambda: all(each.left.is_set() for each in a.connections))
        # The Host header is the client's, as always.
        assert {each.head.get("Host") for each in b.requests} == {"localhost"}


MODEL = "add"


async def test_requests_follow_their_model() -> None:
    """Models are unloaded and loaded at servers, and requests follow."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(DemoServer()) for _ in range(2)]
        gateway = await stack.enter_async_context(
            running_gateway(*[server.url for server in servers], upstream={"model_discovery": True})
        )
        client = await stack.enter_async_context(gateway.client())

        def having() -> list[bool]:
            return [MODEL in (state.models or ()) for state in gateway.pool.snapshot()]

        metadata = request("GET", f"/v2/models/{MODEL}")
        unload = request("POST", f"/v2/repository/models/{MODEL}/unload", b"")
        load = request("POST", f"/v2/repository/models/{MODEL}/load", b"")
        await until(lambda: having() == [True, True])
        async with connect(servers[0].url) as beside:
            assert (await beside.ask(unload)).status == 200
        gateway.pool.refresh_models()
        await until(lambda: having() == [False, True])
        statuses = [(await client.ask(metadata)).status for _ in range(10)]
        assert statuses == [200] * 10
        # It is unloaded where it still is; then any server says that it is missing.
        assert (await client.ask(unload)).status == 200
        await until(lambda: having() == [False, False])
        assert (await client.ask(metadata)).status == 404
        # It is loaded everywhere.
        assert (await client.ask(load)).status == 200
        await until(lambda: having() == [True, True])
