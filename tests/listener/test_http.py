import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.exchange.base import ClientAnswer, ClientRequest
from gateway.listener.http import Exchange, HttpListener
from gateway.listener.sockets import tcp_sockets, unix_socket
from gateway.listener.tls import ServerTls, TlsFiles
from gateway.observe.access_log import AccessLog
from tests.servers.addresses import HOST
from tests.servers.certificates import certificate_files, client_context, server_certificate
from tests.servers.handshakes import hold_handshakes
from tests.servers.http_text import chunked, message, request
from tests.servers.raw_client import RawClient, connect
from tests.servers.running_gateway import nothing_left, until


class _Listening:
    """A listener at work, at an address of its own."""

    def __init__(self, listener: HttpListener, sock: socket.socket, url: str) -> None:
        self.listener = listener
        self.sock = sock
        self.url = url


class _Spoken:
    """What is spoken on the listener's address."""

    tls: ServerTls | None = None


@pytest.fixture(autouse=True, params=["http", "https"])
def spoken(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test over TLS too: all that holds on a plain connection holds there."""
    if request.param == "https":
        files = TlsFiles(*certificate_files(tmp_path, server_certificate()))
        monkeypatch.setattr(_Spoken, "tls", ServerTls(files))
    return str(request.param)


@asynccontextmanager
async def _listening(
    exchange: Exchange, access_log: AccessLog | None = None
) -> AsyncIterator[_Listening]:
    async with nothing_left():
        listener = HttpListener(exchange, access_log, tls=_Spoken.tls)
        (sock,) = tcp_sockets(HOST, 0)
        scheme = "http" if _Spoken.tls is None else "https"
        url = "{}://{}:{}".format(scheme, *sock.getsockname())
        await listener.listen(sock)
        yield _Listening(listener, sock, url)
        await listener.drain(0.05, 0.05)


async def _answer(answer: ClientAnswer, body: bytes, **headers: str) -> None:
    await answer.start(200, "", CIMultiDict({"Content-Length": str(len(body)), **headers}))
    await answer.write(body)
    await answer.finish()


async def _body(client: ClientRequest) -> bytes:
    body = b""
    while piece := await client.read():
        body += piece
    return body


async def _echo(client: ClientRequest, answer: ClientAnswer) -> None:
    """Answer with what the exchange is told of a request, and with its body."""
    body = await _body(client)
    told = f"{client.method} {client.target} {client.content_length} {client.headers.get('X')} "
    await _answer(answer, told.encode() + body)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (request("GET", "/a?b"), b"GET /a?b 0 None "),
        (request("POST", "/a%2F", b""), b"POST /a%2F 0 None "),
        (request("POST", "/", b"body", {"X": "y"}), b"POST / 4 y body"),
        (request("GET", "/", b"body"), b"GET / 4 None body"),
        (
            message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
            + chunked(b"bo", b"dy"),
            b"PUT / None None body",
        ),
        (
            message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"}) + chunked(),
            b"PUT / None None ",
        ),
        (b"GET / HTTP/1.0\r\n\r\n", b"GET / 0 None "),
        (request("GET", "http://x/a"), b"GET /a 0 None "),
        (request("GET", "hTTps://x"), b"GET / 0 None "),
    ],
)
async def test_what_an_exchange_is_told(data: bytes, told: bytes) -> None:
    async with _listening(_echo) as here, connect(here.url) as client:
        for _ in range(1 if b"HTTP/1.0" in data else 3):
            reply = await client.ask(data)
            assert (reply.status, reply.body) == (200, told)


async def test_compressed_bodies_are_left_as_they_are() -> None:
    async with _listening(_echo) as here, connect(here.url) as client:
        reply = await client.call("POST", "/", b"\x1f\x8b", {"Content-Encoding": "gzip"})
        assert reply.body.endswith(b"\x1f\x8b")


async def test_an_answer_in_parts() -> None:
    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        assert not answer.started
        headers = CIMultiDict([("X", "1"), ("X", "2"), ("Server", "mine")])
        await answer.start(299, "So So", headers)
        assert answer.started
        await answer.write(b"one")
        await answer.write(b"")
        await answer.write(b"two")
        await answer.finish()

    async with _listening(exchange) as here, connect(here.url) as client:
        for _ in range(2):
            reply = await client.call("GET", "/")
            assert reply.head.first == "HTTP/1.1 299 So So"
            assert reply.head.all("X") == ["1", "2"]
            assert reply.head.get("Server") == "mine"
            assert reply.head.get("Transfer-Encoding") == "chunked"
            assert reply.body == b"onetwo"


@pytest.mark.parametrize(
    ("status", "line"), [(200, "HTTP/1.1 200 OK"), (404, "HTTP/1.1 404 Not Found"), (799, None)]
)
async def test_a_reason_is_found_where_there_is_none(status: int, line: str | None) -> None:
    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        await answer.start(status, "", CIMultiDict({"Content-Length": "0"}))
        await answer.finish()

    async with _listening(exchange) as here, connect(here.url) as client:
        reply = await client.call("GET", "/")
        assert reply.head.first.rstrip() == (line or "HTTP/1.1 799")
        assert reply.head.get("Server") == "tensorgate"


async def test_an_answer_to_head_has_no_body() -> None:
    async def exchange(client: ClientRequest, answer: ClientAnswer) -> None:
        if client.target == "/chunked":
            await answer.start(200, "", CIMultiDict())
            await answer.write(b"body")
            await answer.finish()
        elif client.target == "/error":
            raise bad_request("why")
        else:
            await _answer(answer, b"body")

    async with _listening(exchange) as here, connect(here.url) as client:
        for target in ("/sized", "/chunked", "/error") * 2:
            await client.send(request("HEAD", target))
            head = await client.head()
            assert head.status == (400 if target == "/error" else 200)
            assert head.get("Content-Length") == {"/sized": "4", "/error": "15"}.get(target)
        assert (await client.call("GET", "/sized")).body == b"body"


@pytest.mark.parametrize("kind", list(ErrorKind))
async def test_an_error_is_answered(kind: ErrorKind) -> None:
    async def exchange(_: ClientRequest, __: ClientAnswer) -> None:
        raise GatewayError(kind, "why")

    async with _listening(exchange) as here, connect(here.url) as client:
        for _ in range(2):
            reply = await client.call("GET", "/")
            assert (reply.status, reply.error) == (kind.value.status, "why")


async def test_a_fault_of_our_own_is_logged_and_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def exchange(_: ClientRequest, __: ClientAnswer) -> None:
        raise ZeroDivisionError

    async with _listening(exchange) as here, connect(here.url) as client:
        reply = await client.call("GET", "/a")
        assert (reply.status, reply.error) == (500, "the gateway failed; its log says why")
        assert await client.rest() == b""
    assert "GET /a failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_fault_of_our_own_within_an_answer_cuts_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        await answer.start(200, "", CIMultiDict())
        await answer.write(b"begun")
        raise ZeroDivisionError

    async with _listening(exchange) as here, connect(here.url) as client:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await client.call("GET", "/")
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_an_aborted_answer_ends_in_a_reset(version: str) -> None:
    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        await answer.start(200, "", CIMultiDict())
        await answer.write(b"begun")
        await read.wait()
        answer.abort()

    read = asyncio.Event()
    async with _listening(exchange) as here, connect(here.url) as client:
        await client.send(f"GET / HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        await client.head()
        read.set()
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_aborting_twice_is_aborting() -> None:
    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        await answer.start(200, "", CIMultiDict())
        for _again in range(3):
            answer.abort()
            answer.abort()
            await asyncio.sleep(0.01)

    async with _listening(exchange) as here, connect(here.url) as client:
        await client.send(request("GET", "/"))
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_a_client_that_leaves_ends_its_exchange() -> None:
    ended: list[str] = []

    async def exchange(_: ClientRequest, __: ClientAnswer) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with _listening(exchange) as here:
        async with connect(here.url) as client:
            await client.send(request("GET", "/"))
            await until(lambda: here.listener._busy)
        await until(lambda: not here.listener._busy)
    assert ended == ["cancelled"]


async def test_a_body_left_unread_does_not_end_the_connection() -> None:
    async def exchange(_: ClientRequest, __: ClientAnswer) -> None:
        raise bad_request("not looked at")

    async with _listening(exchange) as here, connect(here.url) as client:
        for _ in range(3):
            data = request("POST", "/", bytes(100_000))
            await client.send(data[:1000])
            assert (await client.reply()).status == 400
            await client.send(data[1000:])


async def test_a_large_body_left_unread_does_not_stop_the_connection() -> None:
    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        await asyncio.sleep(0.05)  # in which as much arrives as is taken
        await _answer(answer, b"not looked at")

    async with _listening(exchange) as here, connect(here.url) as client:
        for size in range(500_000, 800_000, 60_000):
            client.send_now(request("POST", "/", bytes(size)))
            assert (await client.reply()).status == 200


async def test_a_broken_body_is_told_to_who_reads_it() -> None:
    async def exchange(client: ClientRequest, _: ClientAnswer) -> None:
        with pytest.raises(GatewayError, match=r"^the request's body is broken: ") as caught:
            await _body(client)
        raise caught.value

    head = message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
    async with _listening(exchange) as here, connect(here.url) as client:
        await client.send(head + b"2\r\nab\r\n")
        await asyncio.sleep(0.01)
        await client.send(b"what?\r\n")
        reply = await client.reply()
        assert reply.status == 400
        assert "\n" not in reply.error
        assert reply.head.get("Connection") == "close"
        assert await client.rest() == b""


async def test_a_broken_body_that_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        await broken.wait()
        await _answer(answer, b"done")

    broken = asyncio.Event()
    head = message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
    async with _listening(exchange) as here, connect(here.url) as client:
        await client.send(head + b"2\r\nab\r\n")
        await asyncio.sleep(0.01)
        await client.send(b"what?\r\n")
        await asyncio.sleep(0.01)
        broken.set()
        assert (await client.reply()).body == b"done"
        assert await client.rest() == b""
    assert not caplog.records


async def test_a_broken_body_in_the_pipeline() -> None:
    async def exchange(client: ClientRequest, answer: ClientAnswer) -> None:
        await broken.wait()
        await _echo(client, answer)

    broken = asyncio.Event()
    head = message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
    async with _listening(exchange) as here, connect(here.url) as client:
        await client.send(request("GET", "/first") + head + b"2\r\nab\r\n")
        await asyncio.sleep(0.01)
        await client.send(b"what?\r\n")
        await asyncio.sleep(0.01)
        broken.set()
        assert (await client.reply()).body.startswith(b"GET /first")
        assert (await client.reply()).status == 400


async def test_requests_are_read_only_a_little_ahead() -> None:
    """However fast a client sends the next ones."""
    count, most = 1000, 64 * 1024 + 1000 * 1024
    ahead: list[int] = []

    async def exchange(client: ClientRequest, answer: ClientAnswer) -> None:
        if len(ahead) < 30:
            await asyncio.sleep(0.005)  # in which more could come
        (connection,) = here.listener._connections
        ahead.append(len(connection._ahead))
        await _echo(client, answer)

    async with _listening(exchange) as here, connect(here.url) as client:
        client.send_now(request("POST", "/", bytes(8000)) * count)
        for _ in range(count):
            assert len((await client.reply()).body) > 8000
        assert (await client.call("GET", "/last")).status == 200
    assert max(ahead) <= most


TINY = b"1\r\nx\r\n"
CHUNKS = 100_000
CHUNKED_HEAD = message("POST / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})


async def test_tiny_chunks_let_others_in() -> None:
    pieces: list[int] = []

    async def exchange(client: ClientRequest, answer: ClientAnswer) -> None:
        while piece := await client.read():
            pieces.append(len(piece))
        await _answer(answer, b"")

    async with _listening(exchange) as here, connect(here.url) as client:
        await client.send(CHUNKED_HEAD)
        await until(lambda: here.listener._busy)
        (connection,) = here.listener._connections
        # As large as reads may be.
        connection.data_received(memoryview(TINY * CHUNKS))
        assert not connection.transport.is_reading()
        connection.data_received(TINY + b"0\r\n\r\n" + request("GET", "/next"))  # on its way then
        for _ in range(2):
            assert (await client.reply()).status == 200
        assert (await client.call("GET", "/last")).status == 200
    assert sum(pieces) == CHUNKS + 1
    # Each is from a turn of its own.
    assert max(pieces) < 5000


async def test_tiny_chunks_that_nobody_reads() -> None:
    async def exchange(_: ClientRequest, __: ClientAnswer) -> None:
        await sent.wait()
        raise bad_request("not looked at")

    sent = asyncio.Event()
    async with _listening(exchange) as here, connect(here.url) as client:
        await client.send(CHUNKED_HEAD)
        await until(lambda: here.listener._busy)
        (connection,) = here.listener._connections
        connection.data_received(memoryview(TINY * CHUNKS + b"0\r\n\r\n"))
        sent.set()
        assert (await client.reply()).status == 400
        assert (await client.call("GET", "/next")).status == 400


async def test_a_client_that_leaves_behind_tiny_chunks() -> None:
    async def exchange(client: ClientRequest, _: ClientAnswer) -> None:
        await _body(client)

    async with _listening(exchange) as here, connect(here.url) as client:
        await client.send(CHUNKED_HEAD)
        await until(lambda: here.listener._busy)
        (connection,) = here.listener._connections
        connection.data_received(memoryview(TINY * CHUNKS))
        client.reset()
        connection.transport.abort()
        await until(lambda: not here.listener._busy)
        assert not connection._ahead


async def test_a_unix_socket(tmp_path: Path) -> None:
    listener = HttpListener(_echo, None)
    path = str(tmp_path / "s")
    async with nothing_left():
        await listener.listen(unix_socket(path))
        async with connect(f"unix:{path}") as client:
            assert (await client.call("GET", "/")).body == b"GET / 0 None "
        assert await listener.drain(0, 0) == 0


async def test_an_aborted_answer_at_a_unix_socket(tmp_path: Path) -> None:
    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        await answer.start(200, "", CIMultiDict())
        await answer.write(b"begun")
        answer.abort()

    listener = HttpListener(exchange, None)
    path = str(tmp_path / "s")
    async with nothing_left():
        await listener.listen(unix_socket(path))
        async with connect(f"unix:{path}") as client:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await client.call("GET", "/")
        await listener.drain(0, 0)


async def test_several_sockets() -> None:
    listener = HttpListener(_echo, None)
    async with nothing_left():
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

    async def __call__(self, _: ClientRequest, answer: ClientAnswer) -> None:
        await self.go_on.wait()
        await _answer(answer, b"done")


async def test_draining_nothing_takes_no_time() -> None:
    async with _listening(_echo) as here:
        async with connect(here.url) as client:
            assert (await client.call("GET", "/")).status == 200
        await until(lambda: not here.listener._connections)
        async with asyncio.timeout(5):
            assert await here.listener.drain(60, 60) == 0


async def test_draining_closes_idle_connections_after_the_grace() -> None:
    async with _listening(_echo) as here, connect(here.url) as used, connect(here.url) as fresh:
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
    async with _listening(_echo) as here, connect(here.url) as client:
        async with asyncio.timeout(5):
            assert await here.listener.drain(patience, grace) == 0
        assert await client.rest() == b""


async def test_draining_closes_idle_connections_while_others_are_busy() -> None:
    async with _listening(_Slow()) as here, connect(here.url) as busy, connect(here.url) as idle:
        await busy.send(request("GET", "/"))
        await until(lambda: here.listener._busy)
        draining = asyncio.create_task(here.listener.drain(60, 0.05))
        assert await idle.rest() == b""
        assert not draining.done()
        busy.reset()
        await draining


async def test_a_request_in_the_grace_is_answered_as_the_last() -> None:
    async with _listening(_echo) as here, connect(here.url) as used, connect(here.url) as fresh:
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
    async with _listening(_echo) as here, AsyncExitStack() as stack:
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
    async with _listening(_echo) as here, AsyncExitStack() as stack:
        host, port = here.url.rpartition("/")[2].split(":")
        # None of these comes to a turn of the event loop before the drain begins.
        waiting = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(20)
        ]
        draining = asyncio.create_task(here.listener.drain(60, 60))
        for sock in waiting:
            context = client_context() if _Spoken.tls else None
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
    monkeypatch.setattr("gateway.listener.http.HANDSHAKES", 10)
    async with _listening(_echo) as here, AsyncExitStack() as stack:
        known = await stack.enter_async_context(connect(here.url))
        await until(lambda: here.listener.connections)
        hold_handshakes(here.sock)
        half = stack.enter_context(socket.create_connection(here.sock.getsockname()))
        draining = asyncio.create_task(here.listener.drain(60, 60))
        await until(lambda: here.listener.draining)
        reply = await known.call("GET", "/known")
        # In the meantime too, clients are told that this is the last answer.
        assert (reply.body, reply.head.get("Connection")) == (b"GET /known 0 None ", "close")
        # What it sends shows that it has heard the listener, and so ends its handshake.
        context = client_context() if _Spoken.tls else None
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
    monkeypatch.setattr("gateway.listener.http.HANDSHAKES", 0.05)
    async with _listening(_echo) as here:
        hold_handshakes(here.sock)
        with socket.create_connection(here.sock.getsockname()):  # and never says anything
            async with asyncio.timeout(5):
                assert await here.listener.drain(60, 60) == 0


async def test_a_client_that_does_not_close_does_not_hold_up_the_end() -> None:
    async with _listening(_echo) as here, connect(here.url) as client:
        draining = asyncio.create_task(here.listener.drain(60, 0.05))
        await until(lambda: here.listener.draining)
        await client.send(request("GET", "/"))
        async with asyncio.timeout(5):
            assert await draining == 0
        assert (await client.reply()).status == 200


async def test_the_last_answer_arrives_whole_though_its_client_goes_on() -> None:
    size = 200_000  # which the system holds for a client that does not read

    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        asked.append(answer)
        await go_ahead.wait()
        await _answer(answer, bytes(size))

    def ask(host: str, port: str) -> bytes:
        """Send the next request before reading the answer to the first."""
        with ExitStack() as stack:
            client = stack.enter_context(socket.socket())
            client.settimeout(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            if _Spoken.tls:
                tls = client_context().wrap_socket(client, server_hostname=HOST)
                client = stack.enter_context(tls)
            client.sendall(request("GET", "/1"))
            go_on.wait(10)
            client.sendall(request("GET", "/2"))
            with client.makefile("rb") as answered:
                return answered.read()

    asked: list[ClientAnswer] = []
    go_ahead, go_on = asyncio.Event(), threading.Event()
    async with _listening(exchange) as here:
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
    async with _listening(slow) as here, connect(here.url) as client:
        await client.send(request("GET", "/"))
        await until(lambda: here.listener._busy)
        draining = asyncio.create_task(here.listener.drain(60, 0.05))
        await asyncio.sleep(0.02)
        assert not draining.done()
        slow.go_on.set()
        reply = await client.reply()
        assert reply.body == b"done"
        assert reply.head.get("Connection") == "close"
        assert await draining == 0
        assert await client.rest() == b""


async def test_draining_drops_what_takes_too_long() -> None:
    async with _listening(_Slow()) as here, connect(here.url) as one, connect(here.url) as two:
        for client in (one, two):
            await client.send(request("GET", "/"))
        await until(lambda: len(here.listener._busy) == 2)
        async with asyncio.timeout(5):
            assert await here.listener.drain(0.02, 0.02) == 2
        for client in (one, two):
            with pytest.raises(ConnectionResetError):
                await client.rest()


async def test_draining_drops_an_answer_that_takes_too_long() -> None:
    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        await answer.start(200, "", CIMultiDict())
        await answer.write(b"begun")
        await asyncio.sleep(60)

    async with _listening(exchange) as here, connect(here.url) as client:
        await client.send(request("GET", "/"))
        await client.head()
        async with asyncio.timeout(5):
            assert await here.listener.drain(0.02, 0.02) == 1
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_a_client_whose_answer_had_begun_is_told_with_the_next_one() -> None:
    async def exchange(_: ClientRequest, answer: ClientAnswer) -> None:
        await answer.start(200, "", CIMultiDict({"Content-Length": "4"}))
        await go_on.wait()
        await answer.write(b"done")
        await answer.finish()

    go_on = asyncio.Event()
    async with _listening(exchange) as here, connect(here.url) as client:
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
    async def exchange(_: ClientRequest, __: ClientAnswer) -> None:
        raise bad_request("no")

    async with _listening(exchange) as here, connect(here.url) as client:
        await client.send(request("POST", "/", headers={"Content-Length": "9"}))
        assert (await client.reply()).status == 400
        async with asyncio.timeout(5):
            assert await here.listener.drain(0.02, 0.02) == 0
        assert await client.rest() == b""


async def test_each_exchange_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def exchange(client: ClientRequest, answer: ClientAnswer) -> None:
        if client.target == "/bad":
            raise bad_request("no")
        if client.target == "/gone":
            await asyncio.sleep(60)
        await _answer(answer, b"12345")

    async with _listening(exchange, AccessLog()) as here:
        async with connect(here.url) as client:
            await client.call("GET", "/good?x=%20")
            await client.call("POST", "/bad", b"x")
            await client.send(request("GET", "/gone"))
            await until(lambda: here.listener._busy)
        await until(lambda: not here.listener._busy)
    lines = [r.getMessage() for r in caplog.records if r.name == "tensorgate.access"]
    assert [line.split(" B ")[0] for line in lines] == [
        "GET /good?x=%20 200 5",
        "POST /bad 400 14",
        "GET /gone 0 0",
    ]
