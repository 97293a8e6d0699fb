"""Where the listener accepts, and how it drains."""

import asyncio
import socket
import threading
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from multidict import CIMultiDict

from gateway.errors import bad_request
from gateway.listener.server import HttpListener
from gateway.listener.sockets import tcp_sockets, unix_socket
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.listener.running_listener import echo, listening, send
from tests.listener.running_listener import spoken as spoken
from tests.support.addresses import HOST
from tests.support.certificates import client_context
from tests.support.gateway import no_leaks, until
from tests.support.http_messages import request
from tests.support.raw_client import RawClient, connect
from tests.support.servers.stalled_handshakes import stall_handshakes


async def test_a_unix_socket(tmp_path: Path) -> None:
    listener = HttpListener(echo, None)
    path = str(tmp_path / "s")
    async with no_leaks():
        await listener.listen(unix_socket(path))
        async with connect(f"unix:{path}") as client:
            assert (await client.call("GET", "/")).body == b"GET / 0 None "
        assert await listener.drain(0, 0) == 0


async def test_an_aborted_answer_at_a_unix_socket(tmp_path: Path) -> None:
    async def exchange(_: ClientRequest, answer: ClientResponse) -> None:
        await answer.start(200, "", CIMultiDict())
        await answer.write(b"begun")
        answer.abort()

    listener = HttpListener(exchange, None)
    path = str(tmp_path / "s")
    async with no_leaks():
        await listener.listen(unix_socket(path))
        async with connect(f"unix:{path}") as client:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await client.call("GET", "/")
        await listener.drain(0, 0)


async def test_several_sockets() -> None:
    listener = HttpListener(echo, None)
    async with no_leaks():
        urls = []
        for _ in range(2):
            (sock,) = tcp_sockets(HOST, 0)
            urls.append("http://{}:{}".format(*sock.getsockname()))
            await listener.listen(sock)
        for url in urls:
            async with connect(url) as client:
                assert (await client.call("GET", "/")).status == 200
        await listener.drain(0, 0)


class _Slow:
    """An exchange that lasts until it is told to end."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, _: ClientRequest, answer: ClientResponse) -> None:
        await self.go_on.wait()
        await send(answer, b"done")


async def test_draining_nothing_takes_no_time() -> None:
    async with listening(echo) as here:
        async with connect(here.url) as client:
            assert (await client.call("GET", "/")).status == 200
        await until(lambda: not here.listener._connections)
        async with asyncio.timeout(5):
            assert await here.listener.drain(60, 60) == 0


async def test_draining_closes_idle_connections_after_the_grace() -> None:
    async with listening(echo) as here, connect(here.url) as used, connect(here.url) as fresh:
        assert (await used.call("GET", "/")).status == 200
        async with asyncio.timeout(5):
            assert await here.listener.drain(60, 0.05) == 0
        assert await used.rest() == b""
        assert await fresh.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            async with connect(here.url):
                pass


@pytest.mark.parametrize(("patience", "grace"), [(60, 0), (0.05, 60), (0, 60)])
async def test_the_grace_is_no_longer_than_the_patience(patience: float, grace: float) -> None:
    async with listening(echo) as here, connect(here.url) as client:
        async with asyncio.timeout(5):
            assert await here.listener.drain(patience, grace) == 0
        assert await client.rest() == b""


async def test_draining_closes_idle_connections_while_others_are_busy() -> None:
    async with listening(_Slow()) as here, connect(here.url) as busy, connect(here.url) as idle:
        await busy.send(request("GET", "/"))
        await until(lambda: here.listener._active_calls)
        draining = asyncio.create_task(here.listener.drain(60, 0.05))
        assert await idle.rest() == b""
        assert not draining.done()
        busy.reset()
        await draining


async def test_a_request_in_the_grace_is_answered_as_the_last() -> None:
    async with listening(echo) as here, connect(here.url) as used, connect(here.url) as fresh:
        assert (await used.call("GET", "/")).head.get("Connection") is None
        draining = asyncio.create_task(here.listener.drain(60, 60))
        await until(lambda: here.listener.draining)
        for client in (used, fresh):
            reply = await client.call("POST", "/", b"body")
            assert reply.body == b"POST / 4 None body"
            assert reply.head.get("Connection") == "close"
            assert await client.rest() == b""
            await client.close()
        async with asyncio.timeout(5):
            assert await draining == 0


@pytest.mark.asyncio(loop_factories=["uvloop"])  # on one loop only: this test waits
async def test_a_request_that_has_begun_has_a_grace_of_its_own() -> None:
    async with listening(echo) as here, AsyncExitStack() as stack:
        silent, begun, hanging = [
            await stack.enter_async_context(connect(here.url)) for _ in range(3)
        ]
        draining = asyncio.create_task(here.listener.drain(60, 2.0))
        await asyncio.sleep(1.0)
        for client in (begun, hanging):
            await client.send(b"GET / HTTP/1.1\r\n")
        assert await silent.rest() == b""
        assert (await begun.ask(b"Host: x\r\n\r\n")).status == 200
        assert await hanging.rest() == b""
        async with asyncio.timeout(5):
            assert await draining == 0


async def test_who_waits_to_be_accepted_is_served_before_the_end() -> None:
    async with listening(echo) as here, AsyncExitStack() as stack:
        host, port = here.url.rpartition("/")[2].split(":")
        # None of these comes to a turn of the event loop before the drain begins.
        waiting = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(20)
        ]
        draining = asyncio.create_task(here.listener.drain(60, 60))
        for sock in waiting:
            context = client_context() if here.is_tls else None
            streams = await asyncio.open_connection(
                sock=sock, ssl=context, server_hostname=HOST if context else None
            )
            client = RawClient(*streams)
            reply = await client.call("GET", "/")
            assert (reply.status, reply.head.get("Connection")) == (200, "close")
            await client.close()
        async with asyncio.timeout(5):
            assert await draining == 0


async def test_a_handshake_under_way_at_the_end_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.listener.server.HANDSHAKE_TIMEOUT", 10)
    async with listening(echo) as here, AsyncExitStack() as stack:
        known = await stack.enter_async_context(connect(here.url))
        await until(lambda: here.listener.connections)
        stall_handshakes(here.sock)
        half = stack.enter_context(socket.create_connection(here.sock.getsockname()))
        draining = asyncio.create_task(here.listener.drain(60, 60))
        await until(lambda: here.listener.draining)
        reply = await known.call("GET", "/known")
        # In the meantime too, clients are told that this is the last answer.
        assert (reply.body, reply.head.get("Connection")) == (b"GET /known 0 None ", "close")
        # What it sends shows that it has heard the listener, and so ends its handshake.
        context = client_context() if here.is_tls else None
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


async def test_a_handshake_that_never_ends_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.listener.server.HANDSHAKE_TIMEOUT", 0.05)
    async with listening(echo) as here:
        stall_handshakes(here.sock)
        with socket.create_connection(here.sock.getsockname()):  # and never says anything
            async with asyncio.timeout(5):
                assert await here.listener.drain(60, 60) == 0


async def test_a_client_that_does_not_close_does_not_hold_up_the_end() -> None:
    async with listening(echo) as here, connect(here.url) as client:
        draining = asyncio.create_task(here.listener.drain(60, 0.05))
        await until(lambda: here.listener.draining)
        await client.send(request("GET", "/"))
        async with asyncio.timeout(5):
            assert await draining == 0
        assert (await client.read_response()).status == 200


async def test_the_last_answer_arrives_whole_though_its_client_goes_on() -> None:
    size = 200_000  # which the system holds for a client that does not read

    async def exchange(_: ClientRequest, answer: ClientResponse) -> None:
        asked.append(answer)
        await go_ahead.wait()
        await send(answer, bytes(size))

    def ask(host: str, port: str) -> bytes:
        """Send the next request before reading the answer to the first."""
        with ExitStack() as stack:
            client = stack.enter_context(socket.socket())
            client.settimeout(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            if here.is_tls:
                tls = client_context().wrap_socket(client, server_hostname=HOST)
                client = stack.enter_context(tls)
            client.sendall(request("GET", "/1"))
            go_on.wait(10)
            client.sendall(request("GET", "/2"))
            with client.makefile("rb") as answered:
                return answered.read()

    asked: list[ClientResponse] = []
    go_ahead, go_on = asyncio.Event(), threading.Event()
    async with listening(exchange) as here:
        url = here.url.rpartition("/")[2].split(":")
        reading = asyncio.create_task(asyncio.to_thread(ask, *url))
        await until(lambda: asked)
        draining = asyncio.create_task(here.listener.drain(60, 60))
        await until(lambda: here.listener.draining)
        go_ahead.set()
        await until(lambda: all(each._closing for each in here.listener._connections))
        go_on.set()
        head, _, body = (await reading).partition(b"\r\n\r\n")
        assert b"Connection: close" in head
        assert len(body) == size
        async with asyncio.timeout(5):
            assert await draining == 0


async def test_draining_lets_exchanges_finish() -> None:
    slow = _Slow()
    async with listening(slow) as here, connect(here.url) as client:
        await client.send(request("GET", "/"))
        await until(lambda: here.listener._active_calls)
        draining = asyncio.create_task(here.listener.drain(60, 0.05))
        await asyncio.sleep(0.02)
        assert not draining.done()
        slow.go_on.set()
        reply = await client.read_response()
        assert reply.body == b"done"
        assert reply.head.get("Connection") == "close"
        assert await draining == 0
        assert await client.rest() == b""


async def test_draining_drops_what_takes_too_long() -> None:
    async with listening(_Slow()) as here, connect(here.url) as one, connect(here.url) as two:
        for client in (one, two):
            await client.send(request("GET", "/"))
        await until(lambda: len(here.listener._active_calls) == 2)
        async with asyncio.timeout(5):
            assert await here.listener.drain(0.02, 0.02) == 2
        for client in (one, two):
            with pytest.raises(ConnectionResetError):
                await client.rest()


async def test_draining_drops_an_answer_that_takes_too_long() -> None:
    async def exchange(_: ClientRequest, answer: ClientResponse) -> None:
        await answer.start(200, "", CIMultiDict())
        await answer.write(b"begun")
        await asyncio.sleep(60)

    async with listening(exchange) as here, connect(here.url) as client:
        await client.send(request("GET", "/"))
        await client.head()
        async with asyncio.timeout(5):
            assert await here.listener.drain(0.02, 0.02) == 1
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_a_client_whose_answer_had_begun_is_told_with_the_next_one() -> None:
    async def exchange(_: ClientRequest, answer: ClientResponse) -> None:
        await answer.start(200, "", CIMultiDict({"Content-Length": "4"}))
        await go_on.wait()
        await answer.write(b"done")
        await answer.finish()

    go_on = asyncio.Event()
    async with listening(exchange) as here, connect(here.url) as client:
        await client.send(request("GET", "/1"))
        assert (await client.head()).get("Connection") is None
        draining = asyncio.create_task(here.listener.drain(60, 0.05))
        await until(lambda: here.listener.draining)
        go_on.set()
        assert await client.reader.readexactly(4) == b"done"
        reply = await client.call("GET", "/2")
        assert (reply.body, reply.head.get("Connection")) == (b"done", "close")
        assert await client.rest() == b""
        assert await draining == 0


async def test_draining_does_not_wait_for_bodies_nobody_reads() -> None:
    async def exchange(_: ClientRequest, __: ClientResponse) -> None:
        raise bad_request("no")

    async with listening(exchange) as here, connect(here.url) as client:
        await client.send(request("POST", "/", headers={"Content-Length": "9"}))
        assert (await client.read_response()).status == 400
        async with asyncio.timeout(5):
            assert await here.listener.drain(0.02, 0.02) == 0
        assert await client.rest() == b""
