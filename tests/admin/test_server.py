"""The server of the admin address bounds its clients, and drains."""

import asyncio
import logging
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from aiohttp import web

from gateway.admin import server
from gateway.admin.server import AdminServer
from gateway.listener.sockets import open_tcp_sockets
from tests.admin.site import RunningSite, running_site
from tests.support.addresses import HOST
from tests.support.gateway import no_leaks, until
from tests.support.http_messages import request
from tests.support.raw_client import connect

LIVE = request("GET", "/live")


@pytest.fixture
async def site() -> AsyncIterator[RunningSite]:
    async with no_leaks(), running_site() as running:
        yield running


async def test_requests_of_one_connection_are_served_in_turn(site: RunningSite) -> None:
    """Also those that are pipelined."""
    paths = ["/live", "/x", "/ready", "/status", "/metrics"] * 20
    async with site.client() as client:
        await client.send(b"".join(request("GET", path) for path in paths))
        statuses = [(await client.read_response()).status for _ in paths]
    assert statuses == [200, 404, 200, 200, 200] * 20


async def test_request_that_comes_byte_by_byte_is_served(site: RunningSite) -> None:
    async with site.client() as client:
        await client.send(*(bytes([each]) for each in LIVE))
        assert (await client.read_response()).status == 200


async def test_further_connections_are_closed_at_once(
    site: RunningSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 5)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(site.client()) for _ in range(5)]
        for client in clients:
            assert (await client.ask(LIVE)).status == 200
        for _ in range(3):
            async with site.client() as late:
                assert await late.rest() == b""
        for client in clients:
            assert (await client.ask(LIVE)).status == 200
    await until(lambda: not site.connections)
    async with site.client() as client:
        assert (await client.ask(LIVE)).status == 200


async def test_connections_that_come_at_once_are_bounded(
    site: RunningSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 5)
    async with AsyncExitStack() as stack:
        clients = await asyncio.gather(
            *(stack.enter_async_context(site.client()) for _ in range(20))
        )
        await until(lambda: site.connections == 5)
        for client in clients:
            client.send_nowait(LIVE)
        served = 0
        for client in clients:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                served += (await client.read_response()).status == 200
        assert served == 5


@pytest.mark.parametrize("sent", [b"", LIVE[:10], LIVE + LIVE[:10], LIVE])
async def test_client_that_sends_no_whole_request_is_cut_off(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_IDLE_TIMEOUT", 0.05)
    async with no_leaks(), running_site() as site, site.client() as client:
        await client.send(sent)
        await client.rest()
        await until(lambda: not site.connections)


async def test_client_that_has_half_closed_is_gone(
    site: RunningSite, caplog: pytest.LogCaptureFixture
) -> None:
    """So aiohttp has it: browsers, probes and Prometheus keep both directions open."""
    async with site.client() as client:
        client.shutdown_write()
        assert await client.rest() == b""
    async with site.client() as client:
        assert (await client.ask(LIVE)).status == 200
        await client.send(LIVE[:10])
        client.shutdown_write()
        assert await client.rest() == b""
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_client_that_leaves_before_its_response_leaves_nothing(
    site: RunningSite, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        async with site.client() as client:
            await client.send(request("GET", "/metrics"))
    await until(lambda: not site.connections)
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_body_of_a_request_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LINGERING_TIME", 0.05)
    size = 64 << 20
    async with no_leaks(), running_site() as site, site.client() as client:
        head = f"GET /live HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
        await client.send(head.encode(), bytes(1 << 20))
        assert (await client.read_response()).status == 200
        await until(lambda: not site.connections)


async def test_small_body_is_ignored(site: RunningSite) -> None:
    async with site.client() as client:
        for _ in range(3):
            assert (await client.ask(request("GET", "/live", b"x" * 1000))).status == 200


async def test_unix_socket_is_served(tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path)
    sock.listen()
    async with no_leaks(), running_site(sock=sock) as site, site.client() as client:
        assert site.url == f"unix:{path}"
        assert (await client.ask(LIVE)).status == 200
        host = {"Host": "localhost"}
        assert (await client.call("GET", "/api/overview", headers=host)).status == 200


class _Body(bytearray):
    """Bytes that say whether anything holds them."""


class _Slow:
    """An application with a response that waits, and one that is long."""

    def __init__(self) -> None:
        self.may_respond = asyncio.Event()
        self.waiting = 0
        self.body: weakref.ref[_Body] | None = None
        self.application = web.Application()
        self.application.add_routes([web.get("/slow", self._slow), web.get("/long", self._long)])

    async def _slow(self, _: web.Request) -> web.Response:
        self.waiting += 1
        try:
            await self.may_respond.wait()
        finally:
            self.waiting -= 1
        return web.Response(text="done")

    async def _long(self, _: web.Request) -> web.Response:
        body = _Body(64 << 20)
        self.body = weakref.ref(body)
        return web.Response(body=body)


def _listen(admin: AdminServer) -> str:
    (sock,) = open_tcp_sockets(HOST, 0)
    admin.sockets.listen(sock)
    return f"http://{HOST}:{sock.getsockname()[1]}"


async def test_slow_reader_of_a_long_response_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SEND_TIMEOUT", 0.1)
    async with (
        no_leaks(),
        AdminServer(_Slow().application) as admin,
        connect(_listen(admin)) as client,
    ):
        await client.send(request("GET", "/long"))
        assert (await client.head()).status == 200
        await until(lambda: not admin._runner.server.connections)  # type: ignore[union-attr]
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.reader.readexactly(64 << 20)


async def test_idle_connection_holds_no_response() -> None:
    slow = _Slow()
    async with (
        no_leaks(),
        AdminServer(slow.application) as admin,
        connect(_listen(admin)) as client,
    ):
        assert len((await client.ask(request("GET", "/long"))).body) == 64 << 20
        await until(lambda: slow.body is not None and slow.body() is None)


async def test_responses_that_nobody_reads_are_bounded_in_bytes() -> None:
    async with (
        no_leaks(),
        AsyncExitStack() as stack,
        AdminServer(_Slow().application) as admin,
    ):
        url = _listen(admin)
        clients = [await stack.enter_async_context(connect(url)) for _ in range(3)]
        slow, late, other = clients
        for client in (slow, late):
            await client.send(request("GET", "/long"))
            head = await client.head()
            assert head.status == (200 if client is slow else 503)
        assert (await other.ask(request("GET", "/none"))).status == 404  # short ones have room
        await slow.reader.readexactly(64 << 20)
        await other.send(request("GET", "/long"))
        assert (await other.head()).status == 200


async def test_drain_lets_requests_in_progress_finish() -> None:
    slow = _Slow()
    async with no_leaks(), AdminServer(slow.application) as admin:
        url = _listen(admin)
        async with connect(url) as client, connect(url) as idle:
            await client.send(request("GET", "/slow"))
            await until(lambda: slow.waiting)
            draining = asyncio.create_task(admin.drain(0.01))
            assert await idle.rest() == b""
            with pytest.raises(ConnectionRefusedError):
                async with connect(url):
                    pass
            slow.may_respond.set()
            assert (await client.read_response()).body == b"done"
            await draining


async def test_drain_cuts_requests_that_do_not_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SHUTDOWN_TIMEOUT", 0.02)
    slow = _Slow()
    async with no_leaks():
        async with AdminServer(slow.application) as admin, connect(_listen(admin)) as client:
            await client.send(request("GET", "/slow"))
            await until(lambda: slow.waiting)
            await admin.drain(0.0)
            assert await client.rest() == b""
        await until(lambda: not slow.waiting)


async def test_drain_serves_who_was_connecting(site: RunningSite) -> None:
    """Connections in the accept queue, and requests that come within the grace."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(site.client()) for _ in range(10)]
        draining = asyncio.create_task(site.site.drain(0.5))
        for client in clients:
            assert (await client.ask(LIVE)).status == 200
        await draining
        for client in clients:
            assert await client.rest() == b""


async def test_server_that_has_drained_closes_what_it_gets(site: RunningSite) -> None:
    await site.site.drain(0.0)
    await site.site.drain(0.0)
    one, other = socket.socketpair()
    with other:
        other.setblocking(False)
        site.site.adopt(one)
        assert await asyncio.get_running_loop().sock_recv(other, 1) == b""


async def test_connection_that_was_closed_already_is_let_go(site: RunningSite) -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    other.close()
    site.site.adopt(one)
    await until(lambda: not site.site._adoptions)
    await until(lambda: not site.connections)
    assert one.fileno() == -1
