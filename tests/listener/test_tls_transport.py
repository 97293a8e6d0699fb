"""TLS between clients and a running gateway."""

import asyncio
import logging
import re
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.listener import tls_transport
from gateway.listener.connection import ClientConnection
from gateway.listener.server import HttpListener
from gateway.listener.tls_transport import ClientTlsTransport
from gateway.observe.failure_log import REFUSAL_LOG, LimitedLog
from gateway.system import tls_transport as system_tls
from tests.support.certificates import (
    authority,
    ca_file,
    certificate_files,
    client_context,
    expired_certificate,
    server_certificate,
)
from tests.support.compiled import needs_source
from tests.support.doubles.iterations import iterations
from tests.support.gateway import (
    RunningGateway,
    http1_connections,
    no_leaks,
    running_gateway,
    until,
)
from tests.support.http_messages import http_response, request
from tests.support.openssl_client import OpensslClient
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

LARGE = bytes(range(256)) * (128 * 1024)
"""32 MiB."""


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, str]:
    """Return the settings of a gateway with TLS."""
    certificate, key = certificate_files(tmp_path, server_certificate())
    return {"certificate": certificate, "key": key}


@pytest.fixture
def mutual(tls: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return the settings of a gateway whose clients need a certificate."""
    return {**tls, "client_ca": ca_file(tmp_path)}


@pytest.fixture(autouse=True)
def _log_all(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    # That of the process was perhaps used by another test: a gateway would write what it counted.
    REFUSAL_LOG.flush()
    monkeypatch.setattr(tls_transport, "REFUSAL_LOG", LimitedLog("were refused"))


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines above debug, without the warning on the key file."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno > logging.DEBUG and "every user" not in record.getMessage()
    ]


@asynccontextmanager
async def _serving(
    server: ScriptedServer, tls: dict[str, str], **limits: Any
) -> AsyncIterator[RunningGateway]:
    async with no_leaks(), running_gateway(server.url, tls=tls, **limits) as gateway:
        assert gateway.url.startswith("https://127.0.0.1:")
        yield gateway


async def _check_service(url: str, context: ssl.SSLContext | None = None) -> None:
    async with connect(url, context) as client:
        assert (await client.call("GET", "/v2/x")).status == 200


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("https://").rpartition(":")
    return host, int(port)


async def _echo(connection: Connection) -> None:
    while True:
        received = await connection.request()
        await connection.send(http_response(received.body))


async def test_tls_version_and_options(tls: dict[str, str]) -> None:
    async with ScriptedServer() as server, _serving(server, tls) as gateway:
        holder = gateway.gateway.listener.tls
        assert holder is not None
        assert holder.context.options & ssl.OP_NO_RENEGOTIATION
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = client_context()
            context.maximum_version = version
            context.set_alpn_protocols(["other", "http/1.1"])
            async with connect(gateway.url, context) as client:
                assert (await client.call("GET", "/v2/x")).status == 200
                spoken = client._writer.get_extra_info("ssl_object")
                assert spoken.version() == version.name.replace("_", ".")
                assert spoken.selected_alpn_protocol() == "http/1.1"
                assert spoken.compression() is None


class _RecordingTransport(ClientTlsTransport):
    """Records the maximum size of the ssl buffers, which never shrink."""

    most = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        incoming, outgoing = self._incoming, self._outgoing
        self._incoming, self._outgoing = _RecordingBuffer(incoming), _RecordingBuffer(outgoing)  # type: ignore[assignment]


class _RecordingBuffer:
    def __init__(self, buffer: ssl.MemoryBIO) -> None:
        self._buffer = buffer

    @property
    def pending(self) -> int:
        return self._buffer.pending

    def write(self, data: bytes) -> int:
        written = self._buffer.write(data)
        _RecordingTransport.most = max(_RecordingTransport.most, self.pending)
        return written

    def read(self) -> bytes:
        _RecordingTransport.most = max(_RecordingTransport.most, self.pending)
        return self._buffer.read()


async def test_large_bodies_pass_both_ways_and_ssl_buffers_stay_small(
    tls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.listener.server.ClientTlsTransport", _RecordingTransport)
    monkeypatch.setattr(_RecordingTransport, "most", 0)
    async with (
        ScriptedServer(_echo) as server,
        _serving(server, tls) as gateway,
        gateway.client() as client,
    ):
        for body in (LARGE[: 2**23], LARGE[: 2**20], b"small"):
            assert (await client.call("POST", "/v2/x", body)).body == body
    # One call of the state machine, and a partial record.
    assert 0 < _RecordingTransport.most < 64 * 1024 + 20 * 1024


async def test_drain_waits_for_a_slow_reader(tls: dict[str, str]) -> None:
    body = LARGE
    read_on = threading.Event()

    def ask(address: tuple[str, int]) -> bytes:
        with (
            socket.create_connection(address, timeout=10) as sock,
            client_context().wrap_socket(sock, server_hostname="127.0.0.1") as client,
        ):
            client.sendall(request("GET", "/v2/x"))
            read_on.wait(10)
            with client.makefile("rb") as response:
                return response.read()

    async with (
        ScriptedServer(always_respond(http_response(body))) as server,
        _serving(server, tls) as gateway,
        gateway.client() as idle,
        asyncio.timeout(20),
    ):
        reading = asyncio.create_task(asyncio.to_thread(ask, _address(gateway.url)))
        await server.connection()
        listener = gateway.gateway.listener
        await until(lambda: any(connection.unsent for connection in http1_connections(listener)))
        leaving = asyncio.create_task(listener.drain(20, 0.05))
        assert await idle.rest() == b""
        await iterations(20)
        assert not leaving.done()
        read_on.set()
        assert (await reading).endswith(b"\r\n\r\n" + body)
        assert await leaving == 0


async def test_response_that_ends_with_the_connection_is_complete(tls: dict[str, str]) -> None:
    async def until_close(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nwhole")

    def ask(address: tuple[str, int]) -> bytes:
        with (
            socket.create_connection(address, timeout=5) as sock,
            # Unlike asyncio, this raises without close_notify.
            client_context().wrap_socket(
                sock, server_hostname="127.0.0.1", suppress_ragged_eofs=False
            ) as client,
        ):
            client.sendall(b"GET /v2/x HTTP/1.0\r\n\r\n")
            received = b""
            while piece := client.recv(1000):
                received += piece
            return received

    async with ScriptedServer(until_close) as server, _serving(server, tls) as gateway:
        received = await asyncio.to_thread(ask, _address(gateway.url))
        assert received.endswith(b"\r\n\r\nwhole")


def _plain_http(sock: socket.socket) -> None:
    sock.sendall(request("GET", "/v2/x"))
    assert b"HTTP/1.1 400" in sock.recv(1000)


def _nothing(sock: socket.socket) -> None:
    assert sock.recv(1) == b""


def _garbage(sock: socket.socket) -> None:
    sock.sendall(bytes(1000))
    assert len(sock.recv(1000)) < 10  # an alert, or nothing


def _partial_hello(sock: socket.socket) -> None:
    to_client, hello = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context().wrap_bio(to_client, hello, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    sock.sendall(hello.read()[:100])


def _reset(sock: socket.socket) -> None:
    _partial_hello(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7))


def _handshake_with(context: ssl.SSLContext) -> Callable[[socket.socket], None]:
    def shake(sock: socket.socket) -> None:
        with pytest.raises(OSError), context.wrap_socket(sock, server_hostname="127.0.0.1") as own:  # noqa: PT012
            own.sendall(request("GET", "/v2/x"))
            # With TLS 1.3 the client's handshake ends before the server verifies its certificate.
            assert own.recv(1000) == b"", "there was a response"
            raise ConnectionResetError

    return shake


_LEFT = "the client closed the connection amid the handshake"
_NOT_ACCEPTED = "the client's certificate is not accepted by tls.client_ca "


def _tls_1_1() -> ssl.SSLContext:
    context = client_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


def _unknown_authority() -> ssl.SSLContext:
    return client_context(trustme.CA().issue_cert("client"))


def _with(context: Callable[[], ssl.SSLContext]) -> Callable[[socket.socket], None]:
    """Make the context late: the files of its certificates are made for the test."""
    return lambda sock: _handshake_with(context())(sock)


_FAILURES: dict[str, tuple[Callable[[socket.socket], None], str | None]] = {
    "plain HTTP": (_plain_http, "the client sent HTTP without TLS; it must use https"),
    "nothing": (_nothing, "no end within 1 s (limits.request_header_timeout)"),
    "check of an open port": (lambda _: None, None),
    "garbage": (_garbage, "the client does not speak TLS"),
    "partial hello": (_partial_hello, _LEFT),
    "reset": (_reset, _LEFT),
    "TLS 1.1": (_with(_tls_1_1), "no common version: the gateway speaks TLS 1.2 and 1.3"),
    "no certificate": (
        _with(client_context),
        "the client sent no certificate, which tls.client_certificates requires",
    ),
    "certificate of an unknown authority": (
        _with(_unknown_authority),
        _NOT_ACCEPTED + "(unable to get local issuer certificate)",
    ),
    "expired certificate": (
        _with(lambda: client_context(expired_certificate())),
        _NOT_ACCEPTED + "(certificate has expired)",
    ),
    "untrusting client": (
        _with(ssl.create_default_context),
        "the client does not trust the gateway's certificate (tls.certificate)",
    ),
}


@pytest.mark.parametrize(("misbehave", "reason"), _FAILURES.values(), ids=_FAILURES)
async def test_failed_handshake_leaves_one_line_and_no_connection(
    mutual: dict[str, str],
    misbehave: Callable[[socket.socket], None],
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(address: tuple[str, int]) -> None:
        with socket.create_connection(address, timeout=5) as sock:
            misbehave(sock)

    known = client_context(authority().issue_cert("client"))
    async with (
        ScriptedServer() as server,
        _serving(server, mutual, request_header_timeout=1) as gateway,
    ):
        listener = gateway.gateway.listener
        async with connect(gateway.url, known) as other:
            await asyncio.gather(*(asyncio.to_thread(run, _address(gateway.url)) for _ in range(4)))
            assert (await other.call("GET", "/v2/x")).status == 200
            await until(lambda: not listener._handshaking and len(listener._connections) == 1)
        await _check_service(gateway.url, known)
        host, port = _address(gateway.url)
    if reason is None or not _warnings(caplog):
        # A client that has reset its connection is perhaps gone before its first byte was read.
        assert _warnings(caplog) == []
        assert misbehave is _reset or reason is None
        return
    (line,) = _warnings(caplog)
    client = r"(127\.0\.0\.1|a client)" if misbehave is _reset else r"127\.0\.0\.1"
    own = re.escape(f"{host}:{port}")
    assert re.fullmatch(rf"TLS handshake of {client} with {own} failed: (.*)", line)
    assert line.endswith(f" failed: {reason}")


async def test_tls_handshake_during_drain_may_complete(tls: dict[str, str]) -> None:
    def ask(sock: socket.socket) -> bytes:
        with client_context().wrap_socket(sock, server_hostname="127.0.0.1") as client:
            client.sendall(request("GET", "/v2/x"))
            with client.makefile("rb") as response:
                return response.read()

    async with ScriptedServer() as server, _serving(server, tls) as gateway:
        listener = gateway.gateway.listener
        with socket.create_connection(_address(gateway.url), timeout=10) as late:
            await until(lambda: listener._handshaking)
            draining = asyncio.create_task(listener.drain(20, 20))
            await until(lambda: listener.draining)
            response = await asyncio.to_thread(ask, late)
        assert response.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nConnection: close\r\n" in response
        async with asyncio.timeout(5):
            assert await draining == 0


@pytest.mark.parametrize(("drain_timeout", "grace"), [(20, 0.05), (0, 60)])
async def test_drain_does_not_wait_for_a_silent_tls_handshake(
    tls: dict[str, str], drain_timeout: float, grace: float
) -> None:
    async with ScriptedServer() as server, _serving(server, tls) as gateway:
        listener = gateway.gateway.listener
        with socket.create_connection(_address(gateway.url)) as silent:
            await until(lambda: listener._handshaking)
            async with asyncio.timeout(5):
                await listener.drain(drain_timeout, grace)
            silent.settimeout(5)
            assert silent.recv(1) == b""


async def test_optional_client_certificate_is_verified(mutual: dict[str, str]) -> None:
    known = client_context(authority().issue_cert("client"))
    optional = {**mutual, "client_certificates": "optional"}
    async with ScriptedServer() as server, _serving(server, optional) as gateway:
        await _check_service(gateway.url)
        await _check_service(gateway.url, known)
        with pytest.raises(OSError):
            await _check_service(gateway.url, _unknown_authority())


async def test_certificate_change_keeps_open_connections(
    tls: dict[str, str], tmp_path: Path
) -> None:
    def shown(client: object) -> bytes:
        der = client._writer.get_extra_info("ssl_object").getpeercert(True)  # type: ignore[attr-defined]
        assert isinstance(der, bytes)
        return der

    async with (
        ScriptedServer() as server,
        _serving(server, tls) as gateway,
        gateway.client() as before,
    ):
        old = shown(before)
        certificate_files(tmp_path, authority().issue_cert("127.0.0.1"))
        holder = gateway.gateway.listener.tls
        assert holder is not None
        holder.reload_if_changed()
        holder.reload_if_changed()
        async with gateway.client() as after:
            assert shown(after) != old
            for client in (before, after):
                assert (await client.call("GET", "/v2/x")).status == 200


async def test_client_that_fills_each_read_does_not_starve_others(
    tls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1024
    log: list[str] = []
    update = ClientTlsTransport.buffer_updated

    def updated(transport: ClientTlsTransport, nbytes: int) -> None:
        if nbytes == size and transport._established:
            log.append("read")
            asyncio.get_running_loop().call_soon(log.append, "others")
        update(transport, nbytes)

    monkeypatch.setattr(system_tls, "CIPHERTEXT", memoryview(bytearray(size)))
    monkeypatch.setattr(ClientTlsTransport, "buffer_updated", updated)
    async with (
        ScriptedServer(_echo) as server,
        _serving(server, tls) as gateway,
        gateway.client() as client,
    ):
        body = LARGE[: 100 * size]
        assert (await client.call("POST", "/v2/x", body)).body == body
    assert len(log) > 100
    assert log == ["read", "others"] * (len(log) // 2)


async def _stall(stack: AsyncExitStack, url: str, count: int) -> list[socket.socket]:
    """Open connections whose handshake does not go on; each second one has begun it."""
    stalled = []
    for number in range(count):
        sock = stack.enter_context(socket.create_connection(_address(url), timeout=5))
        if number % 2:
            _partial_hello(sock)
        stalled.append(sock)
    return stalled


def _is_closed(sock: socket.socket) -> bool:
    """Whether the gateway has closed the connection, which it may also have reset."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    ("name", "value"), [("MAX_HANDSHAKES", 5), ("descriptor_limit", lambda: 10)]
)
async def test_handshakes_are_bounded_and_shared_by_clients(
    tls: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: object,
) -> None:
    monkeypatch.setattr(tls_transport, name, value)
    async with (
        ScriptedServer() as server,
        _serving(server, tls) as gateway,
        AsyncExitStack() as stack,
    ):
        listener = gateway.gateway.listener
        other = stack.enter_context(
            socket.create_connection(_address(gateway.url), 5, ("127.0.0.2", 0))
        )
        await until(lambda: listener.tls_handshakes == 1)
        stalled = await _stall(stack, gateway.url, 20)
        await until(lambda: sum(map(_is_closed, stalled)) == 16)
        assert listener.tls_handshakes == 5
        assert not _is_closed(other)
        async with connect(gateway.url) as client:
            assert (await client.call("GET", "/v2/x")).status == 200
    line = _warnings(caplog)[0]  # of those that gave way; the others leave at the end
    assert line.endswith(" failed: it gave way to others; handshakes in progress: 5")


class _FailingConnection(ClientConnection):
    """A connection with a defect in one of its methods, which fails at its first call."""

    failing = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._fail_in("connection_made")

    def data_received(self, data: bytes | memoryview) -> None:
        self._fail_in("data_received")
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._fail_in("connection_lost")

    @classmethod
    def _fail_in(cls, name: str) -> None:
        if name == cls.failing:
            cls.failing = ""
            raise ZeroDivisionError(name)


@needs_source
@pytest.mark.parametrize("method", ["connection_made", "data_received", "connection_lost"])
async def test_connection_with_a_defect_leaves_nothing(
    tls: dict[str, str], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr("gateway.listener.server.ClientConnection", _FailingConnection)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    closed = 0

    def note_closed() -> None:
        nonlocal closed
        closed += 1

    async with ScriptedServer() as server, _serving(server, tls) as gateway:
        listener = gateway.gateway.listener
        listener._on_closed = note_closed
        _FailingConnection.failing = method
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            async with connect(gateway.url) as client:
                await client.call("GET", "/v2/x")
        await until(lambda: closed == 1)
        assert (listener.connections, listener.tls_handshakes) == (0, 0)
        await _check_service(gateway.url)
        await until(lambda: closed == 2)
        gateway.remains.forget_faults()
    assert _FailingConnection.failing == ""


@needs_source
async def test_defect_in_bytes_that_waited_ends_the_connection(
    tls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are processed when reading resumes, where no event loop closes it."""

    class Pausing(ClientConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.read_flow.pause("test")

        def data_received(self, data: bytes | memoryview) -> None:
            raise ZeroDivisionError

    monkeypatch.setattr("gateway.listener.server.ClientConnection", Pausing)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with ScriptedServer() as server, _serving(server, tls) as gateway:
        listener = gateway.gateway.listener
        with await asyncio.to_thread(_send_with_handshake, _address(gateway.url)) as sock:
            await until(lambda: listener.connections)
            (connection,) = http1_connections(listener)
            connection.read_flow.resume("test")
            await until(lambda: not listener.connections)
            await until(lambda: _is_closed(sock))
        monkeypatch.setattr("gateway.listener.server.ClientConnection", ClientConnection)
        gateway.remains.forget_faults()


def _send_with_handshake(address: tuple[str, int]) -> socket.socket:
    """Send a request together with the end of the handshake; return the connection."""
    sock = socket.create_connection(address, timeout=5)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context().wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    sock.sendall(to_server.read())
    while True:
        to_client.write(sock.recv(65536))
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
            break
    client.write(request("GET", "/v2/x"))
    sock.sendall(to_server.read())
    return sock


def _transports(listener: HttpListener) -> list[ClientTlsTransport]:
    return [
        each.transport
        for each in listener._connections
        if isinstance(each.transport, ClientTlsTransport)
    ]


async def test_client_that_is_gone_at_the_end_of_its_handshake_leaves_nothing(
    tls: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """It has no address any more."""

    def leave(address: tuple[str, int]) -> None:
        with _send_with_handshake(address) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with ScriptedServer() as server, _serving(server, tls) as gateway:
        listener = gateway.gateway.listener
        for _ in range(20):
            await asyncio.to_thread(leave, _address(gateway.url))
        await _check_service(gateway.url)
        await until(lambda: not listener.connections and not listener.tls_handshakes)
    assert _warnings(caplog) == []


async def test_transport_that_is_closed_takes_all_calls(tls: dict[str, str]) -> None:
    """Such as the end of a stream, whose connection was reset meanwhile."""
    async with (
        ScriptedServer() as server,
        _serving(server, tls) as gateway,
        gateway.client() as client,
    ):
        listener = gateway.gateway.listener
        assert (await client.call("GET", "/v2/x")).status == 200
        (transport,) = _transports(listener)
        transport.abort()
        for closed in (False, True):
            if closed:
                await until(lambda: not listener.connections)
            transport.write(b"x")
            transport.writelines([b"x"])
            transport.write_eof()
            transport.close()
            transport.abort()
            assert transport.is_closing()
            assert not transport.is_reading()
            assert transport.get_write_buffer_size() == 0
        with suppress(ConnectionError):
            await client.rest()


@contextmanager
def _openssl_client(url: str) -> Iterator[tuple[socket.socket, OpensslClient]]:
    with (
        socket.create_connection(_address(url), timeout=5) as sock,
        closing(OpensslClient(sock)) as client,
    ):
        client.do_handshake()
        yield sock, client


@pytest.mark.parametrize(("requested", "data"), [(False, b""), (True, b"\n")])
async def test_client_that_only_updates_its_keys_is_cut_off(
    tls: dict[str, str], requested: bool, data: bytes
) -> None:
    """Each update takes 30 µs, and is answered, though the client reads nothing."""

    head = request("POST", "/v2/x", headers={"Content-Length": "999999"})

    def flood(url: str) -> bool:
        with _openssl_client(url) as (sock, client):
            sock.sendall(client.encrypt(head))
            with suppress(ConnectionError):
                for _ in range(1000):
                    updates = client.key_updates(20, requested)
                    sock.sendall(updates + (client.encrypt(data) if data else b""))
                return False
        return True

    async with (
        ScriptedServer() as server,
        _serving(server, tls) as gateway,
        gateway.client() as other,
    ):
        assert await asyncio.to_thread(flood, gateway.url)
        assert (await other.call("GET", "/v2/x")).status == 200
        await until(lambda: gateway.gateway.listener.connections == 1)


async def test_client_that_updates_its_keys_now_and_then_is_served(tls: dict[str, str]) -> None:
    def ask(url: str) -> None:
        with _openssl_client(url) as (sock, client):
            for _ in range(500):
                sock.sendall(client.key_updates(1, True) + client.encrypt(request("GET", "/v2/x")))
                assert sock.recv(65536)

    async with ScriptedServer() as server, _serving(server, tls) as gateway:
        await asyncio.to_thread(ask, gateway.url)
        await gateway.until_idle()
        await until(lambda: not gateway.gateway.listener.connections)
