"""The documents of a running gateway tell what happened to its calls."""

import asyncio
from typing import Any

import pytest

from gateway.app import status_publisher
from gateway.settings.schema import Settings
from tests.support.addresses import free_address
from tests.support.gateway import LIMITS, gateway_of
from tests.support.http_messages import request
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import ScriptedServer, never_respond

LOCAL = {"Host": "localhost"}
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe calls fifty times a second."""
    monkeypatch.setattr(status_publisher, "_LAG_INTERVAL", 0.005)
    monkeypatch.setattr("gateway.admin.history.INTERVAL", 0.02)
    monkeypatch.setattr("gateway.admin.view._CACHE_SECONDS", 0.0)


def _settings(url: str) -> Settings:
    return Settings.model_validate(
        {
            "listen": "127.0.0.1:0",
            "admin": free_address(),
            "upstreams": {"u": {"endpoints": [url], "dialect": "triton"}},
            "limits": LIMITS,
        }
    )


async def _only_call(operator: RawClient) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while True:
            reply = await operator.call("GET", "/api/calls", headers=LOCAL)
            if calls := reply.json["calls"]:
                call: dict[str, Any] = calls[0]
                return call
            await asyncio.sleep(0.01)


async def test_call_whose_client_leaves_shows_the_wait_for_the_server() -> None:
    async with ScriptedServer(never_respond) as server:
        settings = _settings(server.url)
        async with (
            gateway_of(settings) as gateway,
            connect(f"http://{settings.admin.listen}") as operator,
        ):
            async with connect(gateway.addresses[0]) as client:
                await client.send(request("GET", "/v2/models/m/ready"))
                await server.connection()
                await asyncio.sleep(0.05)
            call = await _only_call(operator)
    assert (call["status"], call["endpoint"]) == (0, server.url)
    stages = {each["name"]: each["duration_ms"] for each in call["timeline"]}
    assert stages["server"] >= 45
    assert sum(stages.values()) == pytest.approx(call["duration_ms"], abs=5)
    assert stages.get("send", 0) < 5


async def test_connections_that_are_refused_are_failures_of_their_endpoint() -> None:
    settings = _settings(NOWHERE)
    async with (
        gateway_of(settings) as gateway,
        connect(f"http://{settings.admin.listen}") as operator,
    ):
        async with connect(gateway.addresses[0]) as client:
            await asyncio.sleep(0.1)  # the first samples
            for _ in range(3):
                assert (await client.call("GET", "/v2/models/m/ready")).status in (502, 503)
        async with asyncio.timeout(5):
            while True:
                reply = await operator.call("GET", "/api/topology", headers=LOCAL)
                (endpoint,) = reply.json["upstreams"][0]["endpoints"]
                if endpoint["failures_per_second"]:
                    break
                await asyncio.sleep(0.02)
        assert endpoint["failures_by_kind_per_second"]
        overview = (await operator.call("GET", "/api/overview", headers=LOCAL)).json
        (problem,) = overview["problems"]
        assert problem["text"].startswith("no endpoint of u can be used: cannot connect to ")
