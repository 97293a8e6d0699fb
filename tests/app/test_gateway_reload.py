"""Reloads of a gateway while clients are connected: calls, upstreams, limits."""

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.app.build.listening import UnusableSettingsError
from gateway.settings.schema import Settings
from tests.app.reloading import running_gateway, server_named, settings_for
from tests.support.addresses import free_address
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import gateway_of, no_leaks, until
from tests.support.http_messages import request, with_long_head
from tests.support.inference_messages import infer_json
from tests.support.raw_client import connect
from tests.support.servers.gated_response import GatedResponse
from tests.support.servers.name_service import UNKNOWN_NAME, NameService
from tests.support.servers.scripted_server import ScriptedServer, never_respond


async def test_unchanged_upstream_keeps_its_connections() -> None:
    async with (
        server_named("one") as server,
        running_gateway(settings_for(server.url)) as (gateway, url),
        connect(url) as client,
    ):
        assert (await client.call("GET", "/v2/x")).status == 200
        upstream = gateway.active_config.upstreams["u"]
        routes = [{"upstream": "u", "nonfinite": "null"}]
        assert await gateway.reload(settings_for(server.url, routes=routes)) == "routes changed"
        assert gateway.active_config.upstreams["u"] is upstream
        assert (await client.call("GET", "/v2/x")).status == 200
        assert len(server.connections) == 1


async def test_changed_upstream_keeps_the_health_of_its_endpoints() -> None:
    dead = f"http://{free_address()}"
    async with (
        server_named("alive") as alive,
        server_named("new") as new,
        running_gateway(settings_for(dead, alive.url)) as (gateway, url),
        connect(url) as client,
    ):
        for _ in range(12):
            assert (await client.call("GET", "/v2/x")).body == b"alive"
        before = gateway.active_config.upstreams["u"].pool.members[0].ejection
        assert before.ejections == 1
        assert await gateway.reload(settings_for(new.url, dead)) == "upstreams ~u"
        assert gateway.active_config.upstreams["u"].pool.members[1].ejection == before
        for _ in range(4):
            assert (await client.call("GET", "/v2/x")).body == b"new"


@pytest.mark.parametrize("replaced", [False, True], ids=["probes are added", "all are replaced"])
async def test_gateway_stays_ready_through_a_reload(replaced: bool) -> None:
    gated = GatedResponse(b"gated")
    ready = request("GET", "/v2/health/ready")

    def settings(server: ScriptedServer, health: dict[str, Any] | None) -> Settings:
        upstream = {"endpoints": [server.url], "dialect": "triton", "health_check": health}
        return settings_for(upstreams={"u": upstream})

    async with (
        ScriptedServer(gated) as new,
        server_named("old") as old,
        running_gateway(settings(old, {}) if replaced else settings(new, None)) as (gateway, url),
        connect(url) as client,
    ):
        gated.may_respond.set()
        assert (await client.ask(ready)).status == 200
        gated.may_respond.clear()
        await gateway.reload(settings(new, {}))
        await client.send(ready)
        await until(lambda: len(new.requests) == (1 if replaced else 2))
        gated.may_respond.set()
        assert (await client.read_response()).status == 200


@pytest.mark.parametrize("names_fail", [True, False], ids=["names fail", "names take long"])
async def test_changed_upstream_keeps_the_addresses_of_its_names(
    names_fail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = NameService(tritons=["127.0.0.1", "127.0.0.2"])
    monkeypatch.setattr("gateway.app.build.upstreams.resolve_host", names)
    monkeypatch.setattr("gateway.upstream.pool.checks.START_DNS_TIMEOUT", 0.05)
    async with (
        server_named("one") as one,
        AsyncExitStack() as stack,
    ):  # nothing listens at the other address

        def settings(reserve: int) -> Settings:
            server = {
                "endpoints": [f"http://tritons:{one.port}"],
                "dialect": "triton",
                "dns_refresh": "10ms",
                "retry_budget": {"min_concurrency": reserve},
            }
            return settings_for(upstreams={"u": server})

        gateway, url = await stack.enter_async_context(running_gateway(settings(20)))
        client = await stack.enter_async_context(connect(url))
        for _ in range(12):
            assert (await client.call("GET", "/v2/x")).body == b"one"
        before = [member.ejection for member in gateway.active_config.upstreams["u"].pool.members]
        assert [health.ejections for health in before] == [0, 1]
        if names_fail:
            names.answers["tritons"] = UNKNOWN_NAME
        else:
            names.ready.clear()
        await gateway.reload(settings(21))
        pool = gateway.active_config.upstreams["u"].pool
        assert [member.ejection for member in pool.members] == before
        for _ in range(4):
            assert (await client.call("GET", "/v2/x")).body == b"one"
        # The new upstream refreshes its names from now on.
        names.answers["tritons"] = ["127.0.0.1"]
        names.ready.set()
        await until(lambda: len(pool.endpoints) == 1)
        assert (await client.call("GET", "/v2/x")).body == b"one"


@pytest.mark.parametrize("is_fast", [False, True], ids=["streaming_path", "fast_path"])
async def test_waiting_call_is_answered_by_the_old_server(is_fast: bool) -> None:
    data = request("GET", "/v2/x")
    gated = GatedResponse(b"gated")
    async with (
        ScriptedServer(gated) as old,
        server_named("new") as new,
        running_gateway(settings_for(old.url)) as (gateway, url),
    ):
        active_config = gateway.active_config
        async with connect(url) as client:
            await client.send(data if is_fast else with_long_head(data))
            await until(lambda: len(old.requests) == 1)
            assert bool(active_config.planner.in_flight) is is_fast
            await gateway.reload(settings_for(new.url))
            assert active_config.in_use
            gated.may_respond.set()
            assert (await client.read_response()).body == b"gated"
            await until(lambda: not active_config.in_use)
            assert (await client.call("GET", "/v2/x")).body == b"new"


@pytest.mark.parametrize("of_upstream", [False, True])
async def test_running_calls_keep_their_slots(of_upstream: bool) -> None:
    gated = GatedResponse(b"gated")

    def settings(requests: int, other: int, **more: Any) -> Settings:
        places = {"max_requests": requests, "max_queue": 1, "queue_timeout": 30}
        server: dict[str, Any] = {"endpoints": [server_url], "dialect": "triton"}
        if of_upstream:
            server |= {"concurrency": places, "retry_budget": {"min_concurrency": other}}
            return settings_for(upstreams={"u": server}, **more)
        limits = {"metadata_ttl": other}
        return settings_for(upstreams={"u": server}, concurrency=places, limits=limits, **more)

    async with ScriptedServer(gated) as server, AsyncExitStack() as stack:
        server_url = server.url
        gateway, url = await stack.enter_async_context(running_gateway(settings(2, 1)))
        clients = [await stack.enter_async_context(connect(url)) for _ in range(4)]
        for client in clients[:2]:
            await client.send(request("GET", "/v2/x"))
        await until(lambda: len(server.requests) == 2)

        def places() -> tuple[int, int]:
            concurrency_limits = (
                gateway.active_config.limits.concurrency_limit,
                gateway.active_config.upstreams["u"].concurrency_limit,
            )
            (concurrency_limit,) = filter(None, concurrency_limits)
            return concurrency_limit.active, concurrency_limit.queued

        for other in (2, 3):
            await gateway.reload(settings(2, other))
            assert places() == (2, 0)
        await clients[2].send(request("GET", "/v2/x"))
        await until(lambda: places() == (2, 1))
        assert (await clients[3].call("GET", "/v2/x")).status == 503
        with pytest.raises(UnusableSettingsError):  # which changes nothing
            await gateway.reload(settings(3, 4, listen=server_url.removeprefix("http://")))
        assert places() == (2, 1)
        await gateway.reload(settings(3, 4))
        await until(lambda: len(server.requests) == 3)
        await gateway.reload(settings(1, 4))
        await clients[3].send(request("GET", "/v2/x"))
        await until(lambda: places() == (3, 1))
        gated.may_respond.set()
        assert [(await client.read_response()).body for client in clients] == [b"gated"] * 4
        await until(lambda: places() == (0, 0))


async def test_drain_cuts_calls_on_old_and_new_runtimes() -> None:
    async with (
        no_leaks(),
        ScriptedServer(never_respond) as one,
        ScriptedServer(never_respond) as two,
    ):
        settings = [settings_for(each.url, limits={"drain_timeout": 0.05}) for each in (one, two)]
        async with gateway_of(settings[0], unchecked="its stop ends the calls") as gateway:
            url = gateway.addresses[0]
            clients = []
            for server, next_settings in ((one, settings[1]), (two, settings[0])):
                client = await (context := connect(url)).__aenter__()
                clients.append((client, context))
                await client.send(infer_json())
                await server.connection()
                await gateway.reload(next_settings)
        assert gateway.dropped == 2
        for server in (one, two):
            async with asyncio.timeout(5):
                await server.connections[0].left.wait()
        for _, context in clients:
            await context.__aexit__(None, None, None)


async def test_replaced_runtimes_are_freed() -> None:
    async with (
        server_named("x") as server,
        running_gateway(settings_for(server.url)) as (gateway, url),
        connect(url) as client,
    ):
        runtimes = []
        for number in range(10):
            assert (await client.call("GET", "/v2/x")).status == 200
            runtimes.append(weakref.ref(gateway.active_config))
            limits = {"connect_timeout": 1 + number % 2}
            await gateway.reload(settings_for(server.url, limits=limits))

        def left() -> int:
            gc.collect()
            return sum(active_config() is not None for active_config in runtimes)

        await until(lambda: not left())
        assert not gateway._retired


async def test_reload_adds_and_removes_offload_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.app.build.worker_count.NATIVE", True)
    async with running_gateway(settings_for()) as (gateway, _):
        for offload in (1, 0, 2, 1):
            await gateway.reload(settings_for(offload=offload))
            route = gateway.active_config.router.routes[0]
            assert route.destinations[0].offloader is gateway.parts.offload
            assert (gateway.parts.offload is not None) is (offload > 0)
        before = gateway.parts.offload
        await gateway.reload(settings_for(offload=1))
        assert gateway.parts.offload is before
