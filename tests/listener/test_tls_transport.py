"""TLS with clients through a gateway that serves: what they may do, and what it costs others."""

import asyncio
import http.client
import logging
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.listener import tls_transport
from gateway.listener.tls_transport import TlsTransport
from tests.support.certificates import (
    authority,
    ca_file,
    certificate_files,
    client_context,
    expired_certificate,
    server_certificate,
)
from tests.support.gateway import RunningGateway, no_leaks, running_gateway, until
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import binary_response, infer_json
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

LARGE = bytes(range(256)) * (256 * 1024)
"""64 MiB."""


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, str]:
    """Give the settings of a gateway that speaks TLS."""
    certificate, key = certificate_files(tmp_path, server_certificate())
    return {"certificate": certificate, "key": key}


@pytest.fixture
def mutual(tls: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Give the settings of a gateway whose clients must show a certificate."""
    return {**tls, "client_ca": ca_file(tmp_path)}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Give what was logged above debug, but for answers and the key that all may read."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno > logging.DEBUG
        and record.name != "tensorgate.access"
        and "every user" not in record.getMessage()
    ]


@asynccontextmanager
async def _serving(
    server: ScriptedServer, tls: dict[str, str], **limits: Any
) -> AsyncIterator[RunningGateway]:
    async with no_leaks(), running_gateway(server.url, tls=tls, **limits) as gateway:
        assert gateway.url.startswith("https://127.0.0.1:")
        yield gateway


async def _is_served(url: str, context: ssl.SSLContext | None = None) -> None:
    async with connect(url, context) as client:
        assert (await client.call("GET", "/v2/x")).status == 200


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("https://").rpartition(":")
    return host, int(port)


async def _echo(connection: Connection) -> None:
    while True:
        received = await connection.request()
        await connection.send(http_response(received.body))


async def test_tensors(tls: dict[str, str]) -> None:
    async with (
        ScriptedServer(always_respond(binary_response(bytes(8)))) as server,
        _serving(server, tls) as gateway,
        gateway.client() as client,
    ):
        for _ in range(3):
            reply = await client.ask(infer_json())
            assert reply.status == 200
            assert reply.json["outputs"][0]["data"] == [0, 0]


async def test_what_is_spoken(tls: dict[str, str]) -> None:
    async with ScriptedServer() as server, _serving(server, tls) as gateway:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = client_context()
            context.maximum_version = version
            context.set_alpn_protocols(["h2", "http/1.1"])
            async with connect(gateway.url, context) as client:
                assert (await client.call("GET", "/v2/x")).status == 200
                spoken = client._writer.get_extra_info("ssl_object")
                assert spoken.version() == version.name.replace("_", ".")
                assert spoken.selected_alpn_protocol() == "http/1.1"
                assert spoken.compression() is None


async def test_large_bodies_both_ways(tls: dict[str, str]) -> None:
    async with (
        ScriptedServer(_echo) as server,
        _serving(server, tls) as gateway,
        gateway.client() as client,
        asyncio.timeout(60),
    ):
        sending = asyncio.create_task(client.send(request("POST", "/v2/x", LARGE)))
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await client.reader.readexactly(len(LARGE)) == LARGE
        await sending
        assert (await client.call("POST", "/v2/x", b"small")).body == b"small"


class _Watched(TlsTransport):
    """Notes the most that there ever was in the buffers of ssl, which never shrink."""

    most = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        incoming, outgoing = self._incoming, self._outgoing
        self._incoming, self._outgoing = _Watching(incoming), _Watching(outgoing)  # type: ignore[assignment]


class _Watching:
    def __init__(self, buffer: ssl.MemoryBIO) -> None:
        self._buffer = buffer

    @property
    def pending(self) -> int:
        return self._buffer.pending

    def write(self, data: bytes) -> int:
        written = self._buffer.write(data)
        _Watched.most = max(_Watched.most, self.pending)
        return written

    def read(self) -> bytes:
        _Watched.most = max(_Watched.most, self.pending)
        return self._buffer.read()


async def test_what_has_passed_leaves_no_large_buffers(
    tls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.listener.server.TlsTransport", _Watched)
    monkeypatch.setattr(_Watched, "most", 0)
    body = LARGE[: 2**20]
    async with (
        ScriptedServer(_echo) as server,
        _serving(server, tls) as gateway,
        gateway.client() as client,
    ):
        for _ in range(5):
            assert (await client.call("POST", "/v2/x", body)).body == body
    # What is given at once, and a begun record.
    assert 0 < _Watched.most < 64 * 1024 + 20 * 1024


async def test_requests_in_a_row(tls: dict[str, str]) -> None:
    async with (
        ScriptedServer(_echo) as server,
        _serving(server, tls) as gateway,
        gateway.client() as client,
    ):
        bodies = [b"%d" % number * 5000 for number in range(10)]
        await client.send(b"".join(request("POST", "/v2/x", body) for body in bodies))
        assert [(await client.read_response()).body for _ in bodies] == bodies


async def test_a_client_that_sends_byte_by_byte(tls: dict[str, str]) -> None:
    async with (
        ScriptedServer(_echo) as server,
        _serving(server, tls) as gateway,
        gateway.client() as client,
    ):
        for byte in request("POST", "/v2/x", b"hello"):
            await client.send(bytes([byte]))
        assert (await client.read_response()).body == b"hello"


async def test_a_slow_reader_has_its_whole_answer_when_the_gateway_stops(
    tls: dict[str, str],
) -> None:
    body = LARGE[: 32 * 2**20]
    go_on = threading.Event()

    def ask(address: tuple[str, int]) -> bytes:
        with (
            socket.create_connection(address, timeout=10) as sock,
            client_context().wrap_socket(sock, server_hostname="127.0.0.1") as client,
        ):
            client.sendall(request("GET", "/v2/x"))
            go_on.wait(10)
            with client.makefile("rb") as answered:
                return answered.read()

    async with (
        ScriptedServer(always_respond(http_response(body))) as server,
        _serving(server, tls) as gateway,
        gateway.client() as idle,
        asyncio.timeout(20),
    ):
        reading = asyncio.create_task(asyncio.to_thread(ask, _address(gateway.url)))
        await server.connection()
        listener = gateway.gateway._listener
        await until(lambda: any(connection.unsent for connection in listener._connections))
        leaving = asyncio.create_task(listener.drain(20, 0.05))
        assert await idle.rest() == b""
        await asyncio.sleep(0.1)
        assert not leaving.done()
        go_on.set()
        assert (await reading).endswith(b"\r\n\r\n" + body)
        assert await leaving == 0


async def test_an_answer_that_breaks_off_is_seen_to(tls: dict[str, str]) -> None:
    async def half(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhalf")
        await asyncio.sleep(0.05)
        connection.reset()

    async with (
        ScriptedServer(half) as server,
        _serving(server, tls) as gateway,
        gateway.client() as client,
    ):
        # Where only the end of the connection ends an answer, a farewell would make it whole.
        await client.send(b"GET /v2/x HTTP/1.0\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_an_answer_that_ends_with_the_connection(tls: dict[str, str]) -> None:
    async def until_close(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nwhole")

    def ask(address: tuple[str, int]) -> bytes:
        with (
            socket.create_connection(address, timeout=5) as sock,
            # Unlike asyncio, this raises where there is no farewell.
            client_context().wrap_socket(
                sock, server_hostname="127.0.0.1", suppress_ragged_eofs=False
            ) as client,
        ):
            client.sendall(b"GET /v2/x HTTP/1.0\r\n\r\n")
            said = b""
            while piece := client.recv(1000):
                said += piece
            return said

    async with ScriptedServer(until_close) as server, _serving(server, tls) as gateway:
        said = await asyncio.to_thread(ask, _address(gateway.url))
        assert said.endswith(b"\r\n\r\nwhole")


def _plain_http(sock: socket.socket) -> None:
    sock.sendall(request("GET", "/v2/x"))
    assert b"HTTP/1.1 400" in sock.recv(1000)


def _nothing(sock: socket.socket) -> None:
    assert sock.recv(1) == b""


def _garbage(sock: socket.socket) -> None:
    sock.sendall(bytes(1000))
    assert len(sock.recv(1000)) < 10  # an alert, or nothing


def _half_a_hello(sock: socket.socket) -> None:
    to_client, hello = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context().wrap_bio(to_client, hello, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    sock.sendall(hello.read()[:100])


def _reset(sock: socket.socket) -> None:
    _half_a_hello(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7))


def _shake_with(context: ssl.SSLContext) -> Callable[[socket.socket], None]:
    def shake(sock: socket.socket) -> None:
        with pytest.raises(OSError), context.wrap_socket(sock, server_hostname="127.0.0.1") as own:  # noqa: PT012
            own.sendall(request("GET", "/v2/x"))
            # By TLS 1.3 a client has finished before its certificate is looked at.
            assert own.recv(1000) == b"", "it was answered"
            raise ConnectionResetError

    return shake


def _old() -> ssl.SSLContext:
    context = client_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


def _stranger() -> ssl.SSLContext:
    return client_context(trustme.CA().issue_cert("client"))


@pytest.mark.parametrize(
    "fault",
    [
        _plain_http,
        _nothing,
        _garbage,
        _half_a_hello,
        _reset,
        lambda sock: _shake_with(_old())(sock),
        lambda sock: _shake_with(client_context())(sock),
        lambda sock: _shake_with(_stranger())(sock),
        lambda sock: _shake_with(client_context(expired_certificate()))(sock),
        lambda sock: _shake_with(ssl.create_default_context())(sock),
    ],
    ids=[
        "plain HTTP",
        "nothing",
        "garbage",
        "half a hello",
        "reset",
        "TLS 1.1",
        "no certificate",
        "a stranger's certificate",
        "an expired certificate",
        "a client without trust",
    ],
)
async def test_a_client_without_a_handshake_costs_nothing(
    mutual: dict[str, str],
    fault: Callable[[socket.socket], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tls_transport, "HANDSHAKE_TIME", 1.0)

    def run(address: tuple[str, int]) -> None:
        with socket.create_connection(address, timeout=5) as sock:
            fault(sock)

    known = client_context(authority().issue_cert("client"))
    async with ScriptedServer() as server, _serving(server, mutual) as gateway:
        listener = gateway.gateway._listener
        async with connect(gateway.url, known) as other:
            await asyncio.gather(*(asyncio.to_thread(run, _address(gateway.url)) for _ in range(4)))
            assert (await other.call("GET", "/v2/x")).status == 200
            await until(lambda: not listener._shaking and len(listener._connections) == 1)
        await _is_served(gateway.url, known)
    assert _said(caplog) == []


async def test_a_handshake_under_way_may_still_lead_to_an_answer(tls: dict[str, str]) -> None:
    def ask(sock: socket.socket) -> bytes:
        with client_context().wrap_socket(sock, server_hostname="127.0.0.1") as client:
            client.sendall(request("GET", "/v2/x"))
            with client.makefile("rb") as answered:
                return answered.read()

    async with ScriptedServer() as server, _serving(server, tls) as gateway:
        listener = gateway.gateway._listener
        with socket.create_connection(_address(gateway.url), timeout=10) as late:
            await until(lambda: listener._shaking)
            draining = asyncio.create_task(listener.drain(20, 20))
            await until(lambda: listener.draining)
            answered = await asyncio.to_thread(ask, late)
        assert answered.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nConnection: close\r\n" in answered
        async with asyncio.timeout(5):
            assert await draining == 0


async def test_a_handshake_under_way_does_not_hold_up_the_end(tls: dict[str, str]) -> None:
    async with ScriptedServer() as server, _serving(server, tls) as gateway:
        listener = gateway.gateway._listener
        with socket.create_connection(_address(gateway.url)) as silent:
            await until(lambda: listener._shaking)
            async with asyncio.timeout(5):
                await listener.drain(20, 0.05)
            silent.settimeout(5)
            assert silent.recv(1) == b""


async def test_certificates_that_clients_may_show(mutual: dict[str, str]) -> None:
    known = client_context(authority().issue_cert("client"))
    optional = {**mutual, "client_certificates": "optional"}
    async with ScriptedServer() as server, _serving(server, optional) as gateway:
        await _is_served(gateway.url)
        await _is_served(gateway.url, known)
        with pytest.raises(OSError):
            await _is_served(gateway.url, _stranger())


async def test_connections_go_on_when_the_certificate_changes(
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
        holder = gateway.gateway._listener._tls
        assert holder is not None
        holder.look()
        holder.look()
        async with gateway.client() as after:
            assert shown(after) != old
            for client in (before, after):
                assert (await client.call("GET", "/v2/x")).status == 200


async def test_a_real_client(tls: dict[str, str]) -> None:
    def ask(host: str, port: int) -> list[bytes]:
        client = http.client.HTTPSConnection(host, port, timeout=10, context=client_context())
        bodies = []
        for size in (0, 10, 300_000):
            client.request("POST", "/v2/x", body=LARGE[:size])
            bodies.append(client.getresponse().read())
        client.close()
        return bodies

    async with ScriptedServer(_echo) as server, _serving(server, tls) as gateway:
        bodies = await asyncio.to_thread(ask, *_address(gateway.url))
    assert bodies == [LARGE[:size] for size in (0, 10, 300_000)]


async def test_a_client_that_fills_each_read_lets_others_in(
    tls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1024
    log: list[str] = []
    update = TlsTransport.buffer_updated

    def updated(transport: TlsTransport, nbytes: int) -> None:
        if nbytes == size and transport not in transport._shaking:
            log.append("read")
            asyncio.get_running_loop().call_soon(log.append, "others")
        update(transport, nbytes)

    monkeypatch.setattr(tls_transport, "_RECEIVED", memoryview(bytearray(size)))
    monkeypatch.setattr(TlsTransport, "buffer_updated", updated)
    async with (
        ScriptedServer(_echo) as server,
        _serving(server, tls) as gateway,
        gateway.client() as client,
    ):
        body = LARGE[: 100 * size]
        assert (await client.call("POST", "/v2/x", body)).body == body
    assert len(log) > 100
    assert log == ["read", "others"] * (len(log) // 2)


async def test_an_early_answer_reaches_a_client_that_still_sends(tls: dict[str, str]) -> None:
    def ask(host: str, port: int) -> int:
        client = http.client.HTTPSConnection(host, port, timeout=10, context=client_context())
        client.request("POST", "/v2/x", body=LARGE[: 8 * 2**20])
        status = client.getresponse().status
        client.close()
        return status

    async with (
        ScriptedServer(_echo) as server,
        _serving(server, tls, request_bytes=1024) as gateway,
    ):
        assert await asyncio.to_thread(ask, *_address(gateway.url)) == 413
