"""Where the listener accepts, and how it drains."""

import asyncio
import socket
import threading
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from multidict import CIMultiDict

from gateway.errors import bad_request
from gateway.listener.connection_host import IdleTimeouts
from gateway.listener.server import HttpListener
from gateway.listener.sockets import open_tcp_sockets, open_unix_socket
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.http1.fake_transport import FakeTransport
from tests.listener.running_listener import echo, respond, running_listener
from tests.listener.running_listener import scheme as scheme
from tests.support.addresses import HOST
from tests.support.certificates import client_context
from tests.support.doubles.iterations import iterations
from tests.support.gateway import http1_connections, no_leaks, until
from tests.support.http_messages import request
from tests.support.raw_client import RawClient, connect
from tests.support.servers.stalled_handshakes import stall_handshakes


async def test_unix_socket_is_served(tmp_path: Path) -> None:
    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if client.target == "/":
            await echo(client, response)
            return
        await response.start(200, "", CIMultiDict())
        await response.write(b"begun")
        response.abort()

    listener = HttpListener(handle)
    path = str(tmp_path / "s")
    async with no_leaks():
        listener.sockets.listen(open_unix_socket(path))
        async with connect(f"unix:{path}") as client:
            assert (await client.call("GET", "/")).body == b"GET / 0 None "
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await client.call("GET", "/abort")
        assert await listener.drain(0, 0) == 0


async def test_client_with_the_most_idle_connections_makes_room_for_others() -> None:
    listener = HttpListener(echo, ())
    async with no_leaks():
        (sock,) = open_tcp_sockets(HOST, 0)
        address = sock.getsockname()
        listener.sockets.listen(sock)
        assert not listener.make_room()
        with ExitStack() as stack:
            crowd = [
                stack.enter_context(
                    socket.create_connection(address, source_address=("127.0.0.9", 0))
                )
                for _ in range(12)
            ]
            async with connect("http://{}:{}".format(*address)) as innocent:
                await innocent.call("GET", "/")
                await until(lambda: listener.connections == 13)
                assert listener.make_room()
                await until(lambda: listener.connections == 10)
                assert (await innocent.call("GET", "/")).status == 200
            for each in crowd:
                each.setblocking(False)
            assert [each.recv(1) for each in crowd[:3]] == [b"", b"", b""]  # the oldest
            with pytest.raises(BlockingIOError):
                crowd[3].recv(1)
        await listener.drain(0, 0)


@pytest.mark.parametrize(("drain_timeout", "grace"), [(60, 0.05), (60, 0), (0.05, 60)])
async def test_drain_closes_idle_connections_after_the_grace_or_the_drain_timeout(
    drain_timeout: float, grace: float
) -> None:
    async with (
        running_listener(echo) as running,
        connect(running.url) as used,
        connect(running.url) as fresh,
    ):
        assert (await used.call("GET", "/")).status == 200
        async with asyncio.timeout(5):
            assert await running.listener.drain(drain_timeout, grace) == 0
        assert await used.rest() == b""
        assert await fresh.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            async with connect(running.url):
                pass


async def test_response_during_the_grace_closes_the_connection() -> None:
    async with (
        running_listener(echo) as running,
        connect(running.url) as used,
        connect(running.url) as fresh,
    ):
        assert (await used.call("GET", "/")).head.get("Connection") is None
        draining = asyncio.create_task(running.listener.drain(60, 60))
        await until(lambda: running.listener.draining)
        for client in (used, fresh):
            reply = await client.call("POST", "/", b"body")
            assert reply.body == b"POST / 4 None body"
            assert reply.head.get("Connection") == "close"
            assert await client.rest() == b""
            await client.close()
        async with asyncio.timeout(5):
            assert await draining == 0


@pytest.mark.asyncio(loop_factories=["uvloop"])  # only on one loop, because it takes seconds
async def test_partial_request_extends_the_grace() -> None:
    async with running_listener(echo) as running, AsyncExitStack() as stack:
        silent, begun, hanging = [
            await stack.enter_async_context(connect(running.url)) for _ in range(3)
        ]
        draining = asyncio.create_task(running.listener.drain(60, 2.0))
        await asyncio.sleep(1.0)
        for client in (begun, hanging):
            await client.send(b"GET / HTTP/1.1\r\n")
        assert await silent.rest() == b""
        assert (await begun.ask(b"Host: x\r\n\r\n")).status == 200
        assert await hanging.rest() == b""
        async with asyncio.timeout(5):
            assert await draining == 0


async def test_drain_waits_for_a_tcp_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.listener.accept.HANDSHAKE_TIMEOUT", 10)
    async with running_listener(echo) as running, AsyncExitStack() as stack:
        known = await stack.enter_async_context(connect(running.url))
        await until(lambda: running.listener.connections)
        stall_handshakes(running.sock)
        half = stack.enter_context(socket.create_connection(running.sock.getsockname()))
        draining = asyncio.create_task(running.listener.drain(60, 60))
        await until(lambda: running.listener.draining)
        reply = await known.call("GET", "/known")
        # Meanwhile responses close their connections.
        assert (reply.body, reply.head.get("Connection")) == (b"GET /known 0 None ", "close")
        # The data of the client carries the ACK that completes its handshake.
        context = client_context() if running.is_tls else None
        streams = await asyncio.open_connection(
            sock=half, ssl=context, server_hostname=HOST if context else None
        )
        client = RawClient(*streams)
        reply = await client.call("GET", "/half")
        assert (reply.body, reply.head.get("Connection")) == (b"GET /half 0 None ", "close")
        for each in (known, client):
            await each.close()
        async with asyncio.timeout(5):
            assert await draining == 0


async def test_drain_does_not_wait_for_an_endless_tcp_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.listener.accept.HANDSHAKE_TIMEOUT", 0.05)
    async with running_listener(echo) as running:
        stall_handshakes(running.sock)
        with socket.create_connection(running.sock.getsockname()):  # it stays silent
            async with asyncio.timeout(5):
                assert await running.listener.drain(60, 60) == 0


async def test_drain_does_not_wait_for_a_client_to_close() -> None:
    async with running_listener(echo) as running, connect(running.url) as client:
        draining = asyncio.create_task(running.listener.drain(60, 0.05))
        await until(lambda: running.listener.draining)
        await client.send(request("GET", "/"))
        async with asyncio.timeout(5):
            assert await draining == 0
        assert (await client.read_response()).status == 200


async def test_last_response_is_complete_though_the_client_still_sends() -> None:
    size = 200_000  # fits the socket buffers of a client that does not read

    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        asked.append(response)
        await go_ahead.wait()
        await respond(response, bytes(size))

    def ask(host: str, port: str) -> bytes:
        """Send a second request before reading the first response."""
        with ExitStack() as stack:
            client = stack.enter_context(socket.socket())
            client.settimeout(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            if running.is_tls:
                tls = client_context().wrap_socket(client, server_hostname=HOST)
                client = stack.enter_context(tls)
            client.sendall(request("GET", "/1"))
            go_on.wait(10)
            client.sendall(request("GET", "/2"))
            with client.makefile("rb") as stream:
                return stream.read()

    asked: list[ClientResponse] = []
    go_ahead, go_on = asyncio.Event(), threading.Event()
    async with running_listener(handle) as running:
        url = running.url.rpartition("/")[2].split(":")
        reading = asyncio.create_task(asyncio.to_thread(ask, *url))
        await until(lambda: asked)
        draining = asyncio.create_task(running.listener.drain(60, 60))
        await until(lambda: running.listener.draining)
        go_ahead.set()
        await until(lambda: all(each._closing for each in http1_connections(running.listener)))
        go_on.set()
        head, _, body = (await reading).partition(b"\r\n\r\n")
        assert b"Connection: close" in head
        assert len(body) == size
        async with asyncio.timeout(5):
            assert await draining == 0


async def test_drain_drops_calls_that_take_too_long_and_lets_them_clean_up() -> None:
    ended: list[str] = []

    async def handle(client: ClientRequest, _: ClientResponse) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await iterations(9)
            ended.append(client.target)

    async with (
        running_listener(handle) as running,
        connect(running.url) as one,
        connect(running.url) as two,
    ):
        for client in (one, two):
            await client.send(request("GET", "/"))
        await until(lambda: len(running.listener._active_calls) == 2)
        async with asyncio.timeout(5):
            assert await running.listener.drain(0.02, 0.02) == 2
        assert ended == ["/", "/"]
        for client in (one, two):
            with pytest.raises(ConnectionResetError):
                await client.rest()


async def test_response_after_one_that_began_before_drain_closes_the_connection() -> None:
    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        await response.start(200, "", CIMultiDict({"Content-Length": "4"}))
        await go_on.wait()
        await response.write(b"done")
        await response.finish()

    go_on = asyncio.Event()
    async with running_listener(handle) as running, connect(running.url) as client:
        await client.send(request("GET", "/1"))
        assert (await client.head()).get("Connection") is None
        draining = asyncio.create_task(running.listener.drain(60, 0.05))
        await until(lambda: running.listener.draining)
        go_on.set()
        assert await client.reader.readexactly(4) == b"done"
        reply = await client.call("GET", "/2")
        assert (reply.body, reply.head.get("Connection")) == (b"done", "close")
        assert await client.rest() == b""
        assert await draining == 0


async def test_drain_does_not_wait_for_unread_bodies() -> None:
    async def handle(_: ClientRequest, __: ClientResponse) -> None:
        raise bad_request("no")

    async with running_listener(handle) as running, connect(running.url) as client:
        await client.send(request("POST", "/", headers={"Content-Length": "9"}))
        assert (await client.read_response()).status == 400
        async with asyncio.timeout(5):
            assert await running.listener.drain(0.02, 0.02) == 0
        assert await client.rest() == b""


class _FailingConnection:
    """A connection that can do nothing."""

    def __init__(self) -> None:
        self.fake = FakeTransport()
        self.transport: asyncio.Transport = self.fake
        self.is_idle = False

    def seconds_stalled(self, now: float) -> float:
        return now

    def drop(self, why: str) -> None:
        raise ZeroDivisionError("it is dropped")

    def close_if_idle(self) -> None:
        raise ZeroDivisionError("it is asked whether it is idle")

    def announce_drain(self) -> None:
        raise ZeroDivisionError("it is told of the drain")

    def close_for_drain(self, grace: float) -> None:
        raise ZeroDivisionError("it is told to close")


async def test_connection_that_fails_keeps_no_other_from_its_idle_check_and_stops_no_drain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_listener(echo) as running:
        running.listener.idle_timeouts = IdleTimeouts(keep_alive_timeout=0.2)
        failing = _FailingConnection()
        running.listener.add_connection(failing)
        for _ in range(2):  # also in the checks that follow the failure
            async with connect(running.url) as client:
                assert (await client.call("GET", "/")).status == 200
                assert await client.rest() == b""
        async with connect(running.url) as client, asyncio.timeout(5):
            assert (await client.call("GET", "/")).status == 200
            assert await running.listener.drain(0.2, 0.0) == 0
            assert await client.rest() == b""
        assert "abort" in failing.fake.calls
        for step in ("asked whether it is idle", "told of the drain", "told to close"):
            assert f"it is {step}" in caplog.text
        running.listener.remove_connection(failing)
        await until(lambda: not running.listener.connections)


async def test_socket_that_cannot_be_served_is_closed_and_counted() -> None:
    closed: list[None] = []
    listener = HttpListener(echo, (), lambda: closed.append(None))
    async with no_leaks():
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        listener.adopt(sock)
        await until(lambda: closed)
        assert sock.fileno() == -1
        assert await listener.drain(0, 0) == 0
    assert closed == [None]
