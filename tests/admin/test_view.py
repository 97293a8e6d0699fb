"""What the page shows of a gateway: one state for all operators, and new calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.admin.view import GatewayView
from gateway.app import status_publisher
from gateway.settings.schema import Settings
from tests.admin.site import ChosenSource
from tests.support.addresses import free_address
from tests.support.gateway import LIMITS, gateway_of, no_leaks
from tests.support.http_messages import request
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import ScriptedServer, never_respond


@pytest.fixture
async def source() -> AsyncIterator[ChosenSource]:
    async with no_leaks():
        yield ChosenSource()


async def test_operators_who_look_at_once_see_one_state(source: ChosenSource) -> None:
    """Workers are asked once a second, however many pages are open."""
    async with GatewayView(source) as view:
        await asyncio.gather(
            *(view.overview({}) for _ in range(20)),
            *(view.topology({}) for _ in range(20)),
            *(view.models({}) for _ in range(20)),
        )
    assert source.asked == 1


async def test_state_that_cannot_be_read_is_tried_again(source: ChosenSource) -> None:
    async with GatewayView(source) as view:
        source.error = RuntimeError("nonsense")
        with pytest.raises(RuntimeError):
            await view.overview({})
        source.error = None
        assert (await view.overview({}))["now"]["connections"] == 3


async def test_invalid_query_asks_no_worker(source: ChosenSource) -> None:
    async with GatewayView(source) as view:
        for describe in (view.topology, view.calls):
            with pytest.raises(ValueError, match="limit"):
                await describe({"limit": "x"})
    assert source.asked == 0


LOCAL = {"Host": "localhost"}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe calls fifty times a second."""
    monkeypatch.setattr(status_publisher, "LAG_INTERVAL", 0.005)
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


@pytest.mark.usefixtures("fast")
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
