"""A gateway that goes on with other settings, while clients are connected."""

import asyncio
import gc
import logging
import os
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.app.build.listen import ListenError
from gateway.app.build.tls import UpstreamTlsError
from gateway.app.gateway import Gateway
from gateway.settings.schema import Settings
from tests.support.addresses import HOST, free_address
from tests.support.certificates import ca_file, certificate_files, server_certificate
from tests.support.gateway import LIMITS, no_leaks, until
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import binary_response, infer_json, infer_raw, metadata
from tests.support.raw_client import connect
from tests.support.servers.name_service import UNKNOWN_NAME, NameService
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    always_respond,
    never_respond,
)

NOWHERE = "http://127.0.0.1:1"


def _settings(*urls: str, **more: Any) -> Settings:
    limits = {**LIMITS, **more.pop("limits", {})}
    return Settings.model_validate(
        {
            "listen": f"{HOST}:0",
            "offload": "never",
            "upstreams": {"u": {"endpoints": list(urls) or [NOWHERE], "dialect": "triton"}},
            "limits": limits,
            **more,
        }
    )


@asynccontextmanager
async def _gateway(settings: Settings) -> AsyncIterator[tuple[Gateway, str]]:
    async with no_leaks(), Gateway(settings) as gateway:
        yield gateway, gateway.addresses[0]


class _Streaming:
    """The script of a server whose answer goes on when it may."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, connection: Connection) -> None:
        await connection.request()
        await connection.send(message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}))
        await connection.send(chunk(b"one "))
        await self.go_on.wait()
        await connection.send(chunk(b"two"), chunk(b""))
        await connection.wait_for_close()


class _Held:
    """The script of a server that answers when it may."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, connection: Connection) -> None:
        while True:
            await connection.request()
            await self.go_on.wait()
            await connection.send(http_response(b"held"))


def _names(name: str) -> ScriptedServer:
    return ScriptedServer(always_respond(http_response(name.encode())))


async def test_the_next_request_on_a_connection_goes_where_the_new_settings_say() -> None:
    async with (
        _names("one") as one,
        _names("two") as two,
        _gateway(_settings(one.url)) as (
            gateway,
            url,
        ),
    ):
        async with connect(url) as client:
            for server, name in ((one, b"one"), (two, b"two"), (one, b"one")):
                await gateway.reload(_settings(server.url))
                for _ in range(3):  # from the second one on, without a task
                    assert (await client.call("GET", "/v2/x")).body == name
        assert len(two.requests) == 3


async def test_an_upstream_that_has_not_changed_stays_with_all_it_has() -> None:
    async def models(connection: Connection) -> None:
        while True:
            target = (await connection.request()).head.target
            if target.endswith("/infer"):
                await connection.send(binary_response(bytes(8)))
            else:
                config = target.endswith("config")
                await connection.send(
                    http_response(b'{"max_batch_size": 0}' if config else metadata(-1))
                )

    async with ScriptedServer(models) as server, _gateway(_settings(server.url)) as (gateway, url):
        async with connect(url) as client:
            assert (await client.ask(infer_raw(bytes(8)))).status == 200
            upstream = gateway.runtime.upstreams["u"]
            told = await gateway.reload(
                _settings(server.url, routes=[{"upstream": "u", "nonfinite": "null"}])
            )
            assert told == "routes changed"
            assert gateway.runtime.upstreams["u"] is upstream
            assert (await client.ask(infer_raw(bytes(8)))).status == 200
        assert len(server.connections) == 1
        targets = [received.head.target for received in server.requests]
        assert targets.count("/v2/models/m") == 1


async def test_health_outlives_a_change_of_the_upstream() -> None:
    dead = f"http://{free_address()}"
    async with (
        _names("alive") as alive,
        _names("new") as new,
        _gateway(_settings(dead, alive.url)) as (gateway, url),
        connect(url) as client,
    ):
        for _ in range(12):
            assert (await client.call("GET", "/v2/x")).body == b"alive"
        before = gateway.runtime.upstreams["u"].pool.members[0].ejection
        assert before.ejections == 1
        assert await gateway.reload(_settings(new.url, dead)) == "upstreams ~u"
        assert gateway.runtime.upstreams["u"].pool.members[1].ejection == before
        for _ in range(4):
            assert (await client.call("GET", "/v2/x")).body == b"new"


@pytest.mark.parametrize("replaced", [False, True], ids=["probes are added", "all are replaced"])
async def test_it_is_ready_through_a_reload(replaced: bool) -> None:
    held = _Held()
    ready = request("GET", "/v2/health/ready")

    def settings(server: ScriptedServer, health: dict[str, Any] | None) -> Settings:
        upstream = {"endpoints": [server.url], "dialect": "triton", "health_check": health}
        return _settings(upstreams={"u": upstream})

    async with (
        ScriptedServer(held) as new,
        _names("old") as old,
        _gateway(settings(old, {}) if replaced else settings(new, None)) as (gateway, url),
        connect(url) as client,
    ):
        held.go_on.set()
        assert (await client.ask(ready)).status == 200
        held.go_on.clear()
        await gateway.reload(settings(new, {}))
        await client.send(ready)
        await until(lambda: len(new.requests) == (1 if replaced else 2))
        held.go_on.set()
        assert (await client.read_response()).status == 200


@pytest.mark.parametrize("names_fail", [True, False], ids=["names fail", "names take long"])
async def test_addresses_of_names_outlive_a_change_of_the_upstream(
    names_fail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = NameService(tritons=["127.0.0.1", "127.0.0.2"])
    monkeypatch.setattr("gateway.app.build.pools.resolve_host", names)
    monkeypatch.setattr("gateway.upstream.pool.supervisor._START_DNS_TIMEOUT", 0.05)
    async with _names("one") as one, AsyncExitStack() as stack:  # nothing listens at the other

        def settings(reserve: int) -> Settings:
            server = {
                "endpoints": [f"http://tritons:{one.port}"],
                "dialect": "triton",
                "dns_refresh": "10ms",
                "retry_budget": {"min_concurrency": reserve},
            }
            return _settings(upstreams={"u": server})

        gateway, url = await stack.enter_async_context(_gateway(settings(20)))
        client = await stack.enter_async_context(connect(url))
        for _ in range(12):
            assert (await client.call("GET", "/v2/x")).body == b"one"
        before = [member.ejection for member in gateway.runtime.upstreams["u"].pool.members]
        assert [health.ejections for health in before] == [0, 1]
        if names_fail:
            names.answers["tritons"] = UNKNOWN_NAME
        else:
            names.ready.clear()
        await gateway.reload(settings(21))
        pool = gateway.runtime.upstreams["u"].pool
        assert [member.ejection for member in pool.members] == before
        for _ in range(4):
            assert (await client.call("GET", "/v2/x")).body == b"one"
        # It is the new ones that are looked up from now on.
        names.answers["tritons"] = ["127.0.0.1"]
        names.ready.set()
        await until(lambda: len(pool.endpoints) == 1)
        assert (await client.call("GET", "/v2/x")).body == b"one"


async def test_an_answer_that_has_begun_is_finished_by_the_old_server() -> None:
    script = _Streaming()
    async with (
        ScriptedServer(script) as old,
        _names("new") as new,
        _gateway(_settings(old.url)) as (
            gateway,
            url,
        ),
    ):
        runtime = gateway.runtime
        async with connect(url) as busy, connect(url) as idle:
            await busy.send(request("GET", "/v2/x"))
            await busy.head()
            assert await busy.chunk() == b"one "
            assert await gateway.reload(_settings(new.url)) == "upstreams ~u"
            assert (await idle.call("GET", "/v2/x")).body == b"new"
            assert runtime.in_use
            script.go_on.set()
            assert await busy.whole_body() == b"two"
            await until(lambda: not runtime.in_use)
            async with asyncio.timeout(5):
                await old.connections[0].left.wait()
            assert (await busy.call("GET", "/v2/x")).body == b"new"


@pytest.mark.parametrize("warm", [False, True], ids=["task", "straight"])
async def test_an_exchange_that_waits_is_answered_by_the_old_server(warm: bool) -> None:
    held = _Held()
    async with (
        ScriptedServer(held) as old,
        _names("new") as new,
        _gateway(_settings(old.url)) as (
            gateway,
            url,
        ),
    ):
        runtime = gateway.runtime
        async with connect(url) as client:
            if warm:
                held.go_on.set()
                await client.call("GET", "/v2/x")
                held.go_on.clear()
            await client.send(request("GET", "/v2/x"))
            await until(lambda: len(old.requests) == 1 + warm)
            assert bool(runtime.straight.in_flight) is warm
            await gateway.reload(_settings(new.url))
            assert runtime.in_use
            held.go_on.set()
            assert (await client.read_response()).body == b"held"
            await until(lambda: not runtime.in_use)
            assert (await client.call("GET", "/v2/x")).body == b"new"


@pytest.mark.parametrize("of_upstream", [False, True])
async def test_exchanges_under_way_keep_their_places(of_upstream: bool) -> None:
    held = _Held()

    def settings(requests: int, other: int, **more: Any) -> Settings:
        places = {"max_requests": requests, "max_queue": 1, "queue_timeout": 30}
        server: dict[str, Any] = {"endpoints": [server_url], "dialect": "triton"}
        if of_upstream:
            server |= {"concurrency": places, "retry_budget": {"min_concurrency": other}}
            return _settings(upstreams={"u": server}, **more)
        limits = {"metadata_ttl": other}
        return _settings(upstreams={"u": server}, concurrency=places, limits=limits, **more)

    async with ScriptedServer(held) as server, AsyncExitStack() as stack:
        server_url = server.url
        gateway, url = await stack.enter_async_context(_gateway(settings(2, 1)))
        clients = [await stack.enter_async_context(connect(url)) for _ in range(4)]
        for client in clients[:2]:
            await client.send(request("GET", "/v2/x"))
        await until(lambda: len(server.requests) == 2)

        def places() -> tuple[int, int]:
            concurrency_limits = (
                gateway.runtime.shared.concurrency_limit,
                gateway.runtime.upstreams["u"].concurrency_limit,
            )
            (concurrency_limit,) = filter(None, concurrency_limits)
            return concurrency_limit.active, concurrency_limit.queued

        for other in (2, 3):
            await gateway.reload(settings(2, other))
            assert places() == (2, 0)
        await clients[2].send(request("GET", "/v2/x"))
        await until(lambda: places() == (2, 1))
        assert (await clients[3].call("GET", "/v2/x")).status == 503
        with pytest.raises(ListenError):  # which leaves all as it was
            await gateway.reload(settings(3, 4, listen=server_url.removeprefix("http://")))
        assert places() == (2, 1)
        await gateway.reload(settings(3, 4))
        await until(lambda: len(server.requests) == 3)
        await gateway.reload(settings(1, 4))
        await clients[3].send(request("GET", "/v2/x"))
        await until(lambda: places() == (3, 1))
        held.go_on.set()
        assert [(await client.read_response()).body for client in clients] == [b"held"] * 4
        await until(lambda: places() == (0, 0))


async def test_times_of_an_exchange_are_those_it_began_with() -> None:
    held = _Held()
    limits = {"request_timeout": 1}
    async with (
        ScriptedServer(held) as old,
        _gateway(_settings(old.url, limits=limits)) as (
            gateway,
            url,
        ),
        connect(url) as client,
    ):
        held.go_on.set()
        await client.call("GET", "/v2/x")
        held.go_on.clear()
        await client.send(request("GET", "/v2/x"))
        await until(lambda: gateway.runtime.straight.in_flight)
        assert await gateway.reload(_settings(old.url)) == "limits changed"
        reply = await client.read_response()
        assert reply.status == 504
        assert "not done in 1 s" in reply.error
        held.go_on.set()


async def test_what_is_under_way_at_the_end_ends_on_old_and_new() -> None:
    async with (
        no_leaks(),
        ScriptedServer(never_respond) as one,
        ScriptedServer(never_respond) as two,
    ):
        settings = [_settings(each.url, limits={"drain_timeout": 0.05}) for each in (one, two)]
        async with Gateway(settings[0]) as gateway:
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


async def test_what_is_replaced_is_let_go() -> None:
    async with (
        _names("x") as server,
        _gateway(_settings(server.url)) as (gateway, url),
        connect(url) as client,
    ):
        runtimes = []
        for number in range(10):
            assert (await client.call("GET", "/v2/x")).status == 200
            runtimes.append(weakref.ref(gateway.runtime))
            limits = {"connect_timeout": 1 + number % 2}
            await gateway.reload(_settings(server.url, limits=limits))

        def left() -> int:
            gc.collect()
            return sum(runtime() is not None for runtime in runtimes)

        await until(lambda: not left())
        assert not gateway._retired._tasks


def _append(file: str, text: str) -> None:
    with open(file, "a") as opened:
        opened.write(text)


async def test_addresses_come_and_go(tmp_path: Path) -> None:
    unix = f"unix:{tmp_path / 's'}"
    first, second = free_address(), free_address()
    async with (
        _names("x") as server,
        _gateway(_settings(server.url, listen=[first, unix])) as (gateway, url),
    ):
        sockets = {each.address: each.sockets for each in gateway._listening}
        async with connect(url) as on_first:
            await gateway.reload(_settings(server.url, listen=[unix, second]))
            assert gateway.addresses == [unix, f"http://{second}"]
            with pytest.raises(ConnectionRefusedError):
                async with connect(url):
                    pass
            assert gateway._listening[0].sockets == sockets[gateway._listening[0].address]
            for address in gateway.addresses:
                async with connect(address) as client:
                    assert (await client.call("GET", "/v2/x")).status == 200
            assert (await on_first.call("GET", "/v2/x")).status == 200
            await gateway.reload(_settings(server.url, listen=[first, unix]))
            async with connect(url) as client:
                assert (await client.call("GET", "/v2/x")).status == 200
            assert (await on_first.call("GET", "/v2/x")).status == 200


async def _is_for_operators(address: str) -> bool:
    async with connect(address) as client:
        statuses = [(await client.call("GET", path)).status for path in ("/live", "/v2/x")]
    assert statuses in ([200, 404], [503, 503])
    return statuses == [200, 404]


async def test_addresses_of_clients_and_operators_change_hands(tmp_path: Path) -> None:
    first, second, unix = free_address(), free_address(), f"unix:{tmp_path / 's'}"
    everywhere = (f"http://{first}", f"http://{second}", unix)
    async with _gateway(_settings(listen=[first, unix], admin=second)) as (gateway, _):
        for operators, clients in ((first, [second, unix]), (unix, [first]), (second, [first])):
            await gateway.reload(_settings(listen=clients, admin=operators))
            for address in everywhere:
                if address.removeprefix("http://") in (operators, *clients):
                    for_operators = await _is_for_operators(address)
                    assert for_operators is (address.removeprefix("http://") == operators)
        await gateway.reload(_settings(listen=[first, second]))
        assert not await _is_for_operators(everywhere[1])


async def test_who_waits_at_an_address_that_changes_hands_is_served() -> None:
    first, second = free_address(), free_address()
    host, _, port = second.rpartition(":")
    async with _gateway(_settings(listen=first, admin=second)) as (gateway, _):
        kept, admin = gateway._listening
        waiting = admin.sockets[0].dup()
        gateway._admin.close_sockets(admin.sockets)  # so that nobody accepts meanwhile
        gateway._listening = (kept, replace(admin, sockets=(waiting,)))
        with waiting, socket.create_connection((host, int(port))) as client:
            client.sendall(request("GET", "/v2/x", None, {"Connection": "close"}))
            await gateway.reload(_settings(listen=[first, second]))
            client.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=client.dup())
            async with asyncio.timeout(5):
                assert b" 503 " in await reader.readline()
            writer.close()


async def test_who_waits_at_an_address_that_goes_is_served() -> None:
    """A client counts as connected before anybody has accepted it."""
    first, second = free_address(), free_address()
    async with _names("x") as server, _gateway(_settings(server.url, listen=first)) as (gateway, _):
        with socket.create_connection(first.split(":")) as waiting:  # type: ignore[arg-type]
            waiting.sendall(request("GET", "/v2/x", None, {"Connection": "close"}))
            listening = gateway._listening
            await gateway._listener.stop_listening(listening[0].sockets)
            waiting.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=waiting)
            async with asyncio.timeout(5):
                assert b"200 OK" in await reader.read()
            writer.close()
            gateway._listening = ()
            await gateway.reload(_settings(server.url, listen=second))


async def test_an_address_that_cannot_be_had_leaves_all_as_it_was() -> None:
    free = free_address()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "{}:{}".format(*taken.getsockname())
        async with _names("one") as one, _gateway(_settings(one.url)) as (gateway, url):
            before = gateway.settings, gateway.runtime, gateway.addresses
            with pytest.raises(ListenError, match="Address already in use"):
                await gateway.reload(_settings(listen=[free, address]))
            assert (gateway.settings, gateway.runtime, gateway.addresses) == before
            with pytest.raises(ConnectionRefusedError):
                async with connect(f"http://{free}"):
                    pass
            async with connect(url) as client:
                assert (await client.call("GET", "/v2/x")).body == b"one"
            gc.collect()


async def test_files_that_cannot_be_used_leave_all_as_it_was(tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    servers = {"u": {"endpoints": ["https://127.0.0.1:1"], "tls": {"ca": none}}}
    async with _names("one") as one, _gateway(_settings(one.url)) as (gateway, url):
        with pytest.raises(UpstreamTlsError, match=r"upstreams\.u\.tls\.ca: cannot read"):
            await gateway.reload(_settings(upstreams=servers, listen=free_address()))
        with pytest.raises(ListenError, match=r"tls\.certificate: cannot read"):
            await gateway.reload(_settings(tls={"certificate": none, "key": none}))
        assert gateway.addresses == [url]
        async with connect(url) as client:
            assert (await client.call("GET", "/v2/x")).body == b"one"


async def test_a_fault_while_building_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    async with _names("one") as one, _gateway(_settings(one.url)) as (gateway, url):
        free = free_address()
        monkeypatch.setattr("gateway.app.gateway.build_routes", fail)
        with pytest.raises(RuntimeError):
            await gateway.reload(_settings(listen=free))
        with pytest.raises(ConnectionRefusedError):
            async with connect(f"http://{free}"):
                pass
        async with connect(url) as client:
            assert (await client.call("GET", "/v2/x")).body == b"one"
        gc.collect()


async def test_tls_comes_and_goes_on_an_address_that_stays(tmp_path: Path) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    os.chmod(key, 0o600)
    tls = {"certificate": certificate, "key": key}
    listen = free_address()
    async with (
        _names("x") as server,
        _gateway(_settings(server.url, listen=listen)) as (gateway, url),
        connect(url) as plain,
    ):
        await gateway.reload(_settings(server.url, listen=listen, tls=tls))
        assert gateway.addresses == [f"https://{listen}"]
        async with connect(gateway.addresses[0]) as spoken:
            for client in (plain, spoken):
                assert (await client.call("GET", "/v2/x")).status == 200
            await gateway.reload(_settings(server.url, listen=listen))
            async with connect(url) as client:
                assert (await client.call("GET", "/v2/x")).status == 200
            for client in (plain, spoken):
                assert (await client.call("GET", "/v2/x")).status == 200


async def test_tls_that_is_declared_as_before_stays(tmp_path: Path) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    os.chmod(key, 0o600)
    settings = _settings(listen=free_address(), tls={"certificate": certificate, "key": key})
    async with _gateway(settings) as (gateway, url):
        os.unlink(key)  # which is found by who renews it
        assert await gateway.reload(settings) == "nothing has changed"
        async with connect(url) as client:
            assert (await client.call("GET", "/v2/x")).status == 503


async def test_other_certificates_of_servers_make_another_upstream(tmp_path: Path) -> None:
    ca = ca_file(tmp_path)
    servers = {"u": {"endpoints": ["https://127.0.0.1:1"], "tls": {"ca": ca}}}
    settings = _settings(upstreams=servers)
    async with _gateway(settings) as (gateway, _):
        upstream = gateway.runtime.upstreams["u"]
        assert await gateway.reload(settings) == "nothing has changed"
        assert gateway.runtime.upstreams["u"] is upstream
        _append(ca, "\n")
        assert await gateway.reload(settings) == "upstreams ~u"
        assert gateway.runtime.upstreams["u"] is not upstream


async def test_the_access_log_and_limits_of_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tensorgate.access")
    async with (
        _names("x") as server,
        _gateway(_settings(server.url)) as (gateway, url),
        connect(url) as client,
    ):
        for access, size, status in ((False, "1KiB", 413), (True, "1MiB", 200)):
            limits = {"request_bytes": size}
            await gateway.reload(_settings(server.url, log={"access": access}, limits=limits))
            caplog.clear()
            assert (await client.call("POST", "/v2/x", bytes(2000))).status == status
            assert bool(caplog.messages) is access


async def test_the_helper_comes_and_goes() -> None:
    async with _gateway(_settings()) as (gateway, _):
        for helper in ("always", "never", "always"):
            await gateway.reload(_settings(offload=helper))
            rule = gateway.runtime.routes.rules[0]
            assert rule.routes[0].offloader is gateway._helper
            assert (gateway._helper is not None) is (helper == "always")
        before = gateway._helper
        await gateway.reload(_settings(offload="always"))
        assert gateway._helper is before


async def test_a_gateway_that_is_given_its_connections_does_not_listen() -> None:
    closed: list[None] = []
    async with (
        _names("x") as server,
        no_leaks(),
        Gateway(_settings(server.url), lambda: closed.append(None)) as gateway,
    ):
        await gateway.reload(_settings(server.url, listen=free_address(), workers=3))
        assert gateway.addresses == []
        assert gateway.settings.workers == 1


def _auto(url: str, **more: Any) -> Settings:
    return _settings(upstreams={"u": {"endpoints": [url], "dialect": "auto", **more}})


async def test_what_servers_said_that_they_are_is_kept() -> None:
    """Of an upstream that stays, which is not asked again; and of endpoints of one that changed."""
    itself = b'{"name": "mlserver", "version": "1.7.1", "extensions": []}'

    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            await connection.send(http_response(itself if received.head.target == "/v2" else b"{}"))

    def asked() -> int:
        return sum(received.head.target == "/v2" for received in server.requests)

    async with ScriptedServer(script) as server, _gateway(_auto(server.url)) as (gateway, url):
        first = gateway.runtime.upstreams["u"].dialect_state
        await until(lambda: first.dialect)
        await gateway.reload(_auto(server.url).model_copy(update={"request_id": False}))
        assert gateway.runtime.upstreams["u"].dialect_state is first
        async with connect(url) as client:
            assert (await client.ask(infer_json())).status == 200
        assert asked() == 1
        await gateway.reload(_auto(server.url, required=False))
        dialect_state = gateway.runtime.upstreams["u"].dialect_state
        assert dialect_state is not first
        assert dialect_state.dialect == first.dialect
        await until(lambda: asked() == 2)
        # What the settings say is not asked for.
        await gateway.reload(_auto(server.url, dialect="kserve"))
        assert gateway.runtime.upstreams["u"].dialect.name == "kserve"
        assert asked() == 2
