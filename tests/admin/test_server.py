"""The server of the admin address bounds its clients, and drains."""

import asyncio
import logging
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest
from aiohttp import web

from gateway.admin import server
from gateway.admin.server import AdminServer
from gateway.listener.sockets import open_tcp_sockets
from tests.admin.site import RunningSite, running_site
from tests.support.addresses import HOST
from tests.support.gateway import no_leaks, until
from tests.support.http_messages import request
from tests.support.raw_client import RawClient, connect

LIVE = request("GET", "/live")


@pytest.fixture
async def site() -> AsyncIterator[RunningSite]:
    async with no_leaks(), running_site() as running:
        yield running


@pytest.fixture
async def full_site(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[RunningSite, list[RawClient]]]:
    """Run a site with as many connections as it may have, and return them."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 5)
    async with no_leaks(), running_site() as site:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(site.client()) for _ in range(5)]
            await until(lambda: site.connections == 5)
            yield site, clients
        await until(lambda: not site.connections)
        assert not len(site.site._connections)
        assert not len(site.site._unread)


async def test_further_connection_takes_the_place_of_the_one_that_is_idle_longest(
    full_site: tuple[RunningSite, list[RawClient]],
) -> None:
    site, clients = full_site
    await clients[1].send(LIVE[:10])  # a part of a request changes nothing
    assert (await clients[0].ask(LIVE)).status == 200
    async with site.client() as late, site.client() as later:
        for gone in clients[1:3]:
            assert await gone.rest() == b""
        for client in (late, later, clients[3], clients[4], clients[0]):
            assert (await client.ask(LIVE)).status == 200


async def test_probe_is_answered_beside_the_connections_of_another_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client with the most connections loses one, though another's are older."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 5)
    async with no_leaks(), running_site() as site, AsyncExitStack() as stack:
        probe = await stack.enter_async_context(site.client("127.0.0.2"))
        for _ in range(20):
            other = await stack.enter_async_context(site.client())
            await other.send(LIVE[:10])
        for path in ("/live", "/ready", "/metrics"):
            async with site.client("127.0.0.3") as another:
                assert (await another.ask(request("GET", path))).status == 200
            assert (await probe.ask(request("GET", path))).status == 200
        assert site.connections <= 5


async def test_probe_is_answered_beside_event_streams_and_slow_readers(
    full_site: tuple[RunningSite, list[RawClient]],
) -> None:
    """Even if each other connection has a request in progress."""
    site, clients = full_site
    stream, *slow = clients
    await stream.send(request("GET", "/api/events", headers={"Host": "localhost"}))
    assert (await stream.head()).status == 200
    for client in slow:
        client.send_nowait(request("GET", "/page/style.css", headers={"Host": "localhost"}) * 1000)
    await until(lambda: len(site.site._unread) == len(slow))
    for path in ("/live", "/ready", "/metrics"):
        async with site.client() as probe:
            assert (await probe.ask(request("GET", path))).status == 200
    # The longest in progress gave way.
    assert b"event: overview" in await stream.rest()


async def test_connections_that_come_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 5)
    async with no_leaks(), running_site() as site, AsyncExitStack() as stack:
        clients = await asyncio.gather(
            *(stack.enter_async_context(site.client()) for _ in range(20))
        )
        await until(lambda: not site.site._adoptions and site.connections == 5)
        for client in clients:
            client.send_nowait(LIVE)
        served = 0
        for client in clients:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                served += (await client.read_response()).status == 200
        assert served == 5


class HeldStatuses:
    """The statuses of workers, which come only when a test lets them; counts who asks."""

    def __init__(self, site: RunningSite) -> None:
        self.may_come = asyncio.Event()
        self.asked = 0
        self._site = site

    async def __call__(self) -> list[dict[str, object]]:
        self.asked += 1
        await self.may_come.wait()
        return self._site.source.statuses


async def test_request_whose_client_has_left_is_not_waited_for(
    site: RunningSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else clients that come and go would make others wait, and count as nobody's."""
    statuses = HeldStatuses(site)
    monkeypatch.setattr(site.source, "worker_statuses", statuses)
    for number in range(10):
        async with site.client() as client:
            accept = {"Accept": f"application/openmetrics-text;version=1.{number}"}
            await client.send(request("GET", "/metrics", headers=accept))
            await until(lambda: len(site.site._connections) == 1)
            if not number:
                await until(lambda: statuses.asked)
        await until(lambda: not len(site.site._connections))
    async with site.client() as client:
        await client.send(request("GET", "/status"))
        statuses.may_come.set()
        assert (await client.read_response()).status == 200
    assert statuses.asked <= 7  # one that was rendered, four that waited, the plain one, this one


async def test_pages_are_rendered_one_at_a_time_for_all_who_wait(
    site: RunningSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = HeldStatuses(site)
    monkeypatch.setattr(site.source, "worker_statuses", statuses)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(site.client()) for _ in range(20)]
        for number, client in enumerate(clients):
            await client.send(request("GET", "/status" if number % 2 else "/metrics"))
            if not number:
                await until(lambda: statuses.asked)
        in_use = site.site._connections._shares["127.0.0.1"].in_use
        await until(lambda: len(in_use) == len(clients))
        assert statuses.asked == 1
        statuses.may_come.set()
        for client in clients:
            assert (await client.read_response()).status == 200
    assert statuses.asked == 3


@pytest.mark.parametrize("sent", [b"", LIVE[:10], LIVE + LIVE[:10], LIVE])
async def test_client_that_sends_no_whole_request_is_cut_off(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_TIMEOUT", 0.05)
    async with no_leaks(), running_site() as site, site.client() as client:
        await client.send(sent)
        await client.rest()
        await until(lambda: not site.connections)


async def test_client_that_leaves_or_half_closes_is_gone(
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
    for _ in range(10):
        async with site.client() as client:
            await client.send(request("GET", "/metrics"))
    await until(lambda: not site.connections)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_body_of_a_request_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LINGERING_TIME", 0.05)
    size = 64 << 20
    async with no_leaks(), running_site() as site, site.client() as client:
        head = f"GET /live HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
        await client.send(head.encode(), bytes(1 << 20))
        assert (await client.read_response()).status == 200
        await until(lambda: not site.connections)


class _Body(bytearray):
    """Bytes that say whether anything holds them."""


class _Slow:
    """An application with a response that waits, and one that is long."""

    def __init__(self) -> None:
        self.may_respond = asyncio.Event()
        self.waiting = 0
        self.body: weakref.ref[_Body] | None = None
        self.application = web.Application()
        self.application.add_routes(
            [
                web.get("/slow", self._slow),
                web.get("/short", self._short),
                web.get("/long", self._long),
            ]
        )

    async def _slow(self, _: web.Request) -> web.Response:
        self.waiting += 1
        try:
            await self.may_respond.wait()
        finally:
            self.waiting -= 1
        return web.Response(text="done")

    async def _short(self, _: web.Request) -> web.Response:
        return web.Response(body=bytes(60 * 1024))

    async def _long(self, _: web.Request) -> web.Response:
        body = _Body(64 << 20)
        self.body = weakref.ref(body)
        return web.Response(body=body)


def _listen(admin: AdminServer) -> str:
    (sock,) = open_tcp_sockets(HOST, 0)
    admin.sockets.listen(sock)
    return f"http://{HOST}:{sock.getsockname()[1]}"


async def test_slow_reader_of_a_long_response_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_TIMEOUT", 0.1)
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
    """The client that reads slowest is cut off, and the next one is served."""
    slow = _Slow()
    async with no_leaks(), AsyncExitStack() as stack, AdminServer(slow.application) as admin:
        url = _listen(admin)
        first, second = [await stack.enter_async_context(connect(url)) for _ in range(2)]
        await first.send(request("GET", "/long"))
        assert (await first.head()).status == 200
        first_body = slow.body
        await second.send(request("GET", "/long"))
        assert (await second.head()).status == 200
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await first.reader.readexactly(64 << 20)
        await until(lambda: first_body is not None and first_body() is None)
        await second.reader.readexactly(64 << 20)


async def test_last_response_that_nobody_reads_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp closes such a connection, which then stays open for as long as the client does."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    slow = _Slow()
    loop = asyncio.get_running_loop()
    async with no_leaks(), AdminServer(slow.application) as admin:
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            admin.adopt(theirs)
            await loop.sock_sendall(ours, request("GET", "/short", headers={"Connection": "close"}))
            assert await loop.sock_recv(ours, 4) == b"HTTP"
            await until(lambda: len(admin._connections) == 1 and not admin._unread)
            async with connect(_listen(admin)) as late:
                assert (await late.ask(request("GET", "/none"))).status == 404


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
    monkeypatch.setattr(server, "SHUTDOWN_TIMEOUT", 0.02)
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
