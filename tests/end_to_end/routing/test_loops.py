"""A gateway whose upstream leads back to it ends the loop; a chain of gateways is no loop."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.observe.call_record import CallRecord
from gateway.settings.schema import Settings
from tests.end_to_end.routing.every_operation import EVERY_OPERATION
from tests.support.addresses import free_address
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import LIMITS, RunningGateway, checked_gateway
from tests.support.gateway_process import gateway_process, write_settings
from tests.support.http_messages import http_response, request
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond

PSEUDONYM = re.compile(r"1\.1 tensorgate-[0-9a-f]{16}")


def _settings(listen: str, server: str, **more: Any) -> Settings:
    return Settings.model_validate(
        {
            "listen": listen,
            "offload": 0,
            "upstreams": {"servers": {"endpoints": [f"http://{server}"], "dialect": "triton"}},
            "limits": LIMITS,
            **more,
        }
    )


_ITS_OWN_CLIENT = "it keeps an idle connection to itself, or to the gateway after it"


@asynccontextmanager
async def _chain(*addresses: str, **more: Any) -> AsyncIterator[list[RunningGateway]]:
    """Run gateways, each in front of the next address."""
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(
                checked_gateway(_settings(own, after, **more), unchecked=_ITS_OWN_CLIENT)
            )
            for own, after in pairwise(addresses)
        ]
        yield running
        for gateway in running:
            await gateway.until_idle()


@pytest.mark.parametrize("via", [True, False], ids=["via", "without via"])
@pytest.mark.parametrize("dialect", ["triton", "auto"])
async def test_gateway_in_front_of_itself_is_a_508(
    dialect: str, via: bool, path: Callable[[bytes], bytes], call_records: list[CallRecord]
) -> None:
    address = free_address()
    upstreams = {"servers": {"endpoints": [f"http://{address}"], "dialect": dialect}}
    async with _chain(address, address, upstreams=upstreams, forwarded={"via": via}) as (gateway,):
        for name, data in EVERY_OPERATION.items():
            call_records.clear()
            async with gateway.client() as client:
                await client.send(path(data))
                assert (await client.head()).status == 508, name
            await gateway.until_idle()
            # One request of each is the gateway's own, to detect the dialect.
            assert len(call_records) <= 2 + 2 * (dialect == "auto")


async def test_gateway_in_front_of_itself_is_not_ready(call_records: list[CallRecord]) -> None:
    address = free_address()
    async with _chain(address, address) as (gateway,):
        async with gateway.client() as client:
            reply = await client.call("GET", "/v2/health/ready")
            assert (reply.status, reply.error.startswith("not ready: upstream ")) == (503, True)
        await gateway.until_idle()
    assert len(call_records) == 2
    assert any("returned 508" in record.error for record in call_records)


@pytest.mark.parametrize("via", [True, False], ids=["via", "without via"])
async def test_chain_of_gateways_is_no_loop(via: bool) -> None:
    async with ScriptedServer(always_respond(http_response(b"{}"))) as server:
        end = server.url.removeprefix("http://")
        addresses = (free_address(), free_address(), free_address(), end)
        async with _chain(*addresses, forwarded={"via": via}) as gateways:
            async with gateways[0].client() as client:
                for _ in range(3):
                    assert (await client.call("GET", "/v2/x")).status == 200
            for gateway in gateways:
                await gateway.until_idle()
        named = server.requests[-1].head.get("Via" if via else "CDN-Loop")
        assert named is not None
        assert len(set(re.findall("tensorgate-[0-9a-f]{16}", named))) == 3


async def test_reload_keeps_the_gateways_name_in_via() -> None:
    async with ScriptedServer(always_respond(http_response(b"{}"))) as server:
        address, end = free_address(), server.url.removeprefix("http://")
        async with _chain(address, end) as (running,):
            async with running.client() as client:
                await client.call("GET", "/v2/x")
                await running.gateway.reload(_settings(address, end, log={"access": False}))
                await client.call("GET", "/v2/x")
            await running.until_idle()
        before, after = [each.head.get("Via") for each in server.requests]
        assert before is not None
        assert PSEUDONYM.fullmatch(before)
        assert after == before


async def test_workers_share_one_name_in_via(tmp_path: Path) -> None:
    """A request comes back to the other worker, which has fewer connections."""
    address = free_address()
    config = write_settings(tmp_path / "g.yaml", f"http://{address}", address, "workers: 2\n")
    async with gateway_process(config) as (process, url):
        for _ in range(8):
            async with connect(url) as client:
                await client.send(request("GET", "/v2/x"))
                assert (await client.read_response()).status == 508
        process.signal(signal.SIGTERM)
        _, _, said = await process.end()
    assert said.count('"GET /v2/x" 508') == 16, said
