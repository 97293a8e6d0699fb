"""Reloads of a gateway while clients are connected: calls, upstreams, limits."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.app.build.listening import UnusableSettingsError
from gateway.settings.schema import Settings
from tests.app.reloading import NOWHERE, running_gateway, server_named, settings_for
from tests.support.addresses import free_address
from tests.support.certificates import certificate_files, server_certificate
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import checked_gateway, gateway_of, no_leaks, until
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


# ------------------------------------------------------ parts that fail, addresses and certificates


_THREADS = {"access log", "traces"}

Cause = Callable[[pytest.MonkeyPatch], None]
"""Makes a part of each reload fail until the patches are undone."""


def _no_thread(name: str) -> Cause:
    """Make threads of that name fail as at the limit of processes."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    return lambda patch: patch.setattr(threading.Thread, "start", fail)


def _no_admin_server(patch: pytest.MonkeyPatch) -> None:
    async def fail(runner: web.AppRunner) -> None:
        raise OSError("no room")

    patch.setattr(web.AppRunner, "setup", fail)


def _no_reader_of(number: int) -> Cause:
    """Make the event loop refuse to watch one of the sockets that start to listen."""

    def patch_loop(patch: pytest.MonkeyPatch) -> None:
        loop, added = asyncio.get_running_loop(), 0
        add_reader = loop.add_reader

        def fail(descriptor: object, *arguments: object) -> None:
            nonlocal added
            if isinstance(descriptor, socket.socket):
                added += 1
                if added == number:
                    raise OSError("no space left on device")
            add_reader(descriptor, *arguments)  # type: ignore[arg-type]

        patch.setattr(loop, "add_reader", fail)

    return patch_loop


def _no_routes(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    patch.setattr("gateway.app.gateway.build_routes", fail)


_CAUSES: dict[str, Cause] = {
    "routes": _no_routes,
    "access log": _no_thread("access log"),
    "traces": _no_thread("traces"),
    "admin site": _no_admin_server,
    "first socket": _no_reader_of(1),
    "second socket": _no_reader_of(2),
    "socket of the admin address": _no_reader_of(3),
}


def _all_is_new(url: str, tmp_path: Path, *addresses: str) -> Settings:
    """Return settings that need a new part of each kind."""
    return settings_for(
        url,
        listen=list(addresses),
        admin=free_address(),
        log={"access": {"path": str(tmp_path / "access.log")}},
        tracing={"endpoint": "http://127.0.0.1:1", "sample": 0},
        limits={"connect_timeout": 1},
    )


async def _is_served(address: str) -> bytes:
    async with connect(address) as client:
        return (await client.call("GET", "/v2/x")).body


async def _refuses(address: str) -> bool:
    try:
        async with connect(f"http://{address}"):
            return False
    except ConnectionRefusedError:
        return True


def _threads() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name in _THREADS)


@pytest.mark.parametrize("part", _CAUSES)
async def test_reload_of_which_a_part_fails_changes_nothing(part: str, tmp_path: Path) -> None:
    first, second = free_address(), free_address()
    async with (
        no_leaks(),
        server_named("one") as one,
        server_named("two") as two,
        checked_gateway(settings_for(one.url, log={"access": False})) as running,
    ):
        gateway, old_url = running.gateway, running.url
        settings = _all_is_new(two.url, tmp_path, first, second)
        before = gateway.settings, gateway.active_config, gateway.addresses, _threads()
        for _ in range(2):
            with pytest.MonkeyPatch.context() as patch:
                _CAUSES[part](patch)
                with pytest.raises((RuntimeError, OSError)):
                    await gateway.reload(settings)
            after = gateway.settings, gateway.active_config, gateway.addresses, _threads()
            assert after == before
            for address in (first, second, str(settings.admin.listen)):
                assert await _refuses(address)
            assert await _is_served(old_url) == b"one"
        await gateway.reload(settings)
        assert gateway.settings == settings
        assert _threads() == ["access log", "traces"]
        for address in (first, second):
            assert await _is_served(f"http://{address}") == b"two"
        async with connect(f"http://{settings.admin.listen}") as operator:
            assert (await operator.call("GET", "/live")).status == 200
        assert await _refuses(old_url.removeprefix("http://"))


async def test_reload_holds_although_an_old_part_cannot_be_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = {"access": {"path": str(tmp_path / "access.log")}}
    address = free_address()
    join = threading.Thread.join

    def fail(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if thread.name == "access log":
            raise OSError("it does not end")

    async with (
        no_leaks(),
        server_named("one") as one,
        server_named("two") as two,
        checked_gateway(settings_for(one.url, log=log, admin=free_address())) as running,
    ):
        settings = settings_for(two.url, listen=address, log={"access": False})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "join", fail)
            changes = await running.gateway.reload(settings)
        assert "upstreams ~u" in changes
        errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
        assert errors == ["the access log of the previous settings could not be closed"]
        running.remains.forget_faults()
        assert running.gateway.settings == settings
        assert await _is_served(f"http://{address}") == b"two"
        assert await _refuses(running.url.removeprefix("http://"))


async def test_endpoint_that_was_drained_while_a_reload_was_prepared_stays_drained() -> None:
    async with (
        no_leaks(),
        server_named("one") as one,
        server_named("two") as two,
        checked_gateway(settings_for(one.url, two.url)) as running,
    ):
        gateway = running.gateway
        prepared = await gateway.prepare(settings_for(one.url, two.url, NOWHERE))
        await gateway.source.drain_endpoint("u", one.url, drained=True, operator="a test")
        await until(lambda: gateway.active_config.upstreams["u"].pool.members[0].drained)
        await prepared.commit()()
        members = gateway.active_config.upstreams["u"].pool.members
        await until(lambda: [each.drained for each in members] == [True, False, False])


async def _is_for_operators(address: str) -> bool:
    async with connect(address) as client:
        statuses = [(await client.call("GET", path)).status for path in ("/live", "/v2/x")]
    assert statuses in ([200, 404], [503, 503])
    return statuses == [200, 404]


async def test_reload_swaps_addresses_of_clients_and_operators(tmp_path: Path) -> None:
    first, second, unix = free_address(), free_address(), f"unix:{tmp_path / 's'}"
    everywhere = (f"http://{first}", f"http://{second}", unix)
    async with running_gateway(settings_for(listen=[first, unix], admin=second)) as (gateway, _):
        for operators, clients in ((first, [second, unix]), (unix, [first]), (second, [first])):
            await gateway.reload(settings_for(listen=clients, admin=operators))
            for address in everywhere:
                if address.removeprefix("http://") in (operators, *clients):
                    for_operators = await _is_for_operators(address)
                    assert for_operators is (address.removeprefix("http://") == operators)
        await gateway.reload(settings_for(listen=[first, second]))
        assert not await _is_for_operators(everywhere[1])


async def test_client_in_the_queue_of_a_swapped_address_is_served() -> None:
    first, second = free_address(), free_address()
    host, _, port = second.rpartition(":")
    async with running_gateway(settings_for(listen=first, admin=second)) as (gateway, _):
        await gateway.operators_served
        kept, admin = gateway._doors.bound
        waiting = admin.sockets[0].dup()
        assert gateway._doors.admin is not None
        gateway._doors.admin.sockets.close_sockets(admin.sockets)  # none is accepted meanwhile
        gateway._doors = gateway._doors._replace(bound=(kept, admin._replace(sockets=(waiting,))))
        with waiting, socket.create_connection((host, int(port))) as client:
            client.sendall(request("GET", "/v2/x", None, {"Connection": "close"}))
            await gateway.reload(settings_for(listen=[first, second]))
            client.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=client.dup())
            async with asyncio.timeout(5):
                assert b" 503 " in await reader.readline()
            writer.close()


async def test_client_in_the_queue_of_a_removed_address_is_served() -> None:
    """A client is connected before its connection is accepted."""
    first, second = free_address(), free_address()
    async with (
        server_named("x") as server,
        running_gateway(settings_for(server.url, listen=first)) as (gateway, _),
    ):
        with socket.create_connection(first.split(":")) as waiting:  # type: ignore[arg-type]
            waiting.sendall(request("GET", "/v2/x", None, {"Connection": "close"}))
            listening = gateway._doors.bound
            await gateway.listener.sockets.stop_listening(listening[0].sockets)
            waiting.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=waiting)
            async with asyncio.timeout(5):
                assert b"200 OK" in await reader.read()
            writer.close()
            gateway._doors = gateway._doors._replace(bound=())
            await gateway.reload(settings_for(server.url, listen=second))


async def test_reload_adds_and_removes_tls_on_an_address(tmp_path: Path) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    os.chmod(key, 0o600)
    tls = {"certificate": certificate, "key": key}
    listen = free_address()
    async with (
        server_named("x") as server,
        running_gateway(settings_for(server.url, listen=listen)) as (gateway, url),
        connect(url) as plain,
    ):
        await gateway.reload(settings_for(server.url, listen=listen, tls=tls))
        assert gateway.addresses == [f"https://{listen}"]
        async with connect(gateway.addresses[0]) as spoken:
            for client in (plain, spoken):
                assert (await client.call("GET", "/v2/x")).status == 200
            await gateway.reload(settings_for(server.url, listen=listen))
            async with connect(url) as client:
                assert (await client.call("GET", "/v2/x")).status == 200
            for client in (plain, spoken):
                assert (await client.call("GET", "/v2/x")).status == 200


async def test_unchanged_tls_is_not_loaded_again(tmp_path: Path) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    os.chmod(key, 0o600)
    settings = settings_for(listen=free_address(), tls={"certificate": certificate, "key": key})
    async with running_gateway(settings) as (gateway, url):
        os.unlink(key)  # which only the file watch notices
        assert await gateway.reload(settings) == "no setting that applies now has changed"
        async with connect(url) as client:
            assert (await client.call("GET", "/v2/x")).status == 503
