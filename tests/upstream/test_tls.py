"""TLS to servers: what the client offers and refuses, its errors, and responses that come early."""

from __future__ import annotations

import asyncio
import socket
import ssl
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from gateway.errors import ErrorKind, GatewayError
from gateway.system.certificates import CertificateFileError, CertificateFiles, client_context
from gateway.upstream.address import TcpAddress, TlsTarget, UnixAddress, parse_server_url
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http.endpoint import HttpEndpoint
from tests.support.addresses import free_address
from tests.support.certificates import (
    authority,
    ca_file,
    certificate_files,
    expired_certificate,
    server_certificate,
    server_context,
)
from tests.support.gateway import no_leaks, until
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import Connection as ServerSide
from tests.support.servers.scripted_server import ScriptedServer, always_respond, never_respond
from tests.support.servers.tls_refusing_server import refusing_server
from tests.upstream.endpoints import (
    EndpointAt,
    ask,
    blocking_server,
    call,
    reset_on_close,
    trusting_context,
)


@asynccontextmanager
async def endpoint(
    url: str,
    context: ssl.SSLContext | None = None,
    server_name: str | None = None,
    connect_timeout: float = 5,
) -> AsyncIterator[HttpEndpoint]:
    async with no_leaks():
        made = HttpEndpoint(
            parse_server_url(url, context or trusting_context(), server_name),
            EndpointOptions(connect_timeout),
        )
        yield made
        await made.close()


async def refusal(
    url: str,
    context: ssl.SSLContext | None = None,
    server_name: str | None = None,
    connect_timeout: float = 5,
) -> str:
    """Return the reason of a failed connect."""
    async with endpoint(url, context, server_name, connect_timeout) as made:
        with pytest.raises(GatewayError) as caught:
            await ask(made)
    assert caught.value.kind is ErrorKind.UNREACHABLE
    begin = f"cannot connect to {url}: "
    assert caught.value.message.startswith(begin)
    return caught.value.message.removeprefix(begin)


def test_server_urls_are_parsed() -> None:
    context = trusting_context()
    assert parse_server_url("http://Triton:80", context) == TcpAddress("Triton", 80)
    assert parse_server_url("unix:/run/s", context) == UnixAddress("/run/s")
    tls = TlsTarget(context, "::1")
    assert parse_server_url("https://[::1]:80", context) == TcpAddress("::1", 80, tls)
    assert parse_server_url("https://h:1", context, "x") == TcpAddress(
        "h", 1, TlsTarget(context, "x")
    )
    assert parse_server_url("https://h.:1", context) == TcpAddress("h.", 1, TlsTarget(context, "h"))
    for url in ("http://Triton:80", "https://[::1]:8000", "https://h.:1", "unix:/run/s"):
        assert parse_server_url(url, context).url == url


async def test_client_offers_its_tls_versions_and_http_1_1() -> None:
    seen: list[tuple[object, ...]] = []
    context = server_context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    names: list[str | None] = []
    context.sni_callback = lambda _, name, __: names.append(name)

    async def script(connection: ServerSide) -> None:
        tls = connection._writer.get_extra_info("ssl_object")
        seen.append((tls.selected_alpn_protocol(), tls.version()))
        await connection.request()
        await connection.send(http_response(b"yes"))

    async with ScriptedServer(script, ssl=context) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        async with endpoint(url) as made:
            assert await ask(made) == b"yes"
    assert seen == [("http/1.1", "TLSv1.3")]
    assert names == ["localhost"]


async def test_server_name_can_be_set() -> None:
    context = server_context(server_certificate("triton.example"))
    async with ScriptedServer(always_respond(http_response(b"yes")), ssl=context) as server:
        async with endpoint(server.url, server_name="triton.example") as made:
            assert await ask(made) == b"yes"
        assert await refusal(server.url) == "its certificate does not name 127.0.0.1"
        reason = await refusal(server.url, server_name="another.example")
        assert reason == "its certificate does not name another.example"


UNTRUSTED: dict[str, tuple[Callable[[], trustme.LeafCert], bool, str]] = {
    "unknown authority": (
        lambda: trustme.CA().issue_cert("127.0.0.1"),
        True,
        "its certificate is not trusted (unable to get local issuer certificate)",
    ),
    # The system does not trust the tests' authority.
    "trust of the system": (server_certificate, False, "its certificate is not trusted ("),
    "expired": (expired_certificate, True, "its certificate has expired"),
}


@pytest.mark.parametrize(("certificate", "trusts", "said"), UNTRUSTED.values(), ids=UNTRUSTED)
async def test_certificate_that_is_not_trusted_is_refused(
    certificate: Callable[[], trustme.LeafCert], trusts: bool, said: str
) -> None:
    context = None if trusts else client_context(CertificateFiles())
    async with ScriptedServer(ssl=server_context(certificate())) as server:
        assert (await refusal(server.url, context)).startswith(said)


async def test_server_with_an_old_tls_version_is_refused() -> None:
    context = server_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with refusing_server(context) as url:
        assert await refusal(url) == "it speaks no TLS of version 1.2 or newer"


async def test_server_without_tls_is_reported() -> None:
    async def plain(connection: ServerSide) -> None:
        await connection.reader.read(5)
        await connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await never_respond(connection)

    async def closing(connection: ServerSide) -> None:
        await connection.reader.read(65536)

    for script, saying in (
        (plain, "it does not speak TLS"),
        (closing, "it closed the connection within the TLS handshake"),
    ):
        async with ScriptedServer(script) as server:
            assert await refusal(server.url.replace("http:", "https:")) == saying


async def test_handshake_times_out() -> None:
    async with ScriptedServer(never_respond) as server:
        url = server.url.replace("http:", "https:")
        assert await refusal(url, connect_timeout=0.1) == "no connection in time"
        async with asyncio.timeout(5):
            await (await server.connection()).left.wait()


async def test_connection_refused_is_reported(tmp_path: Path) -> None:
    assert await refusal(f"https://{free_address()}") == "Connection refused"
    path = tmp_path / "s"
    assert await refusal(f"unix:{path}") == "No such file or directory"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert await refusal(f"unix:{path}") == "Connection refused"


async def test_full_queue_of_a_unix_socket_is_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        listening.bind(path)
        listening.listen(0)
        first.connect(path)
        assert await refusal(f"unix:{path}", connect_timeout=0.1) == "no connection in time"
        async with endpoint(f"unix:{path}") as made:
            asking = asyncio.create_task(ask(made))
            await asyncio.sleep(0.05)
            listening.accept()[0].close()
            accepted, _ = await asyncio.to_thread(listening.accept)
            with accepted:
                assert (await asyncio.to_thread(accepted.recv, 4096)).startswith(b"POST /x ")
                accepted.sendall(http_response(b"at last"))
                assert await asking == b"at last"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_server_that_requires_a_client_certificate(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    context = server_context(clients=authority())
    context.maximum_version = version
    ca, (certificate, key) = ca_file(tmp_path), certificate_files(tmp_path)
    async with ScriptedServer(always_respond(http_response(b"yes")), ssl=context) as server:
        shown = client_context(CertificateFiles(ca, certificate, key))
        async with endpoint(server.url, shown) as made:
            assert await ask(made) == b"yes"
    with refusing_server(context) as url:
        reason = await refusal(url, client_context(CertificateFiles(ca)))
        if version is ssl.TLSVersion.TLSv1_3:
            assert reason == "it asks for a client certificate"
        else:  # TLS 1.2 has no such alert
            assert reason == "TLS failed: sslv3 alert handshake failure"
    other = certificate_files(tmp_path, trustme.CA().issue_cert("gateway"))
    with refusing_server(context) as url:
        reason = await refusal(url, client_context(CertificateFiles(ca, *other)))
        assert reason == "it does not accept the gateway's certificate"


def test_unusable_certificate_files_are_reported_with_their_setting(tmp_path: Path) -> None:
    """Why a file is unusable is shown with the files of the listener: tests/listener/test_tls."""
    certificate, key = certificate_files(tmp_path)
    none = "cannot read /none: No such file or directory"
    faults = {
        CertificateFiles(ca="/none"): f"ca: {none}",
        CertificateFiles(ca=key): f"ca: {key} holds no certificates in PEM form",
        CertificateFiles(None, "/none", key): f"certificate: {none}",
        CertificateFiles(None, certificate, "/none"): f"key: {none}",
    }
    for files, message in faults.items():
        with pytest.raises(CertificateFileError) as caught:
            client_context(files)
        assert str(caught.value) == message


ROUNDS = 20
PIECE = bytes(256 * 1024)
PIECES = 64
REFUSAL = http_response(b"no", {"Connection": "close"}, "413 Too Large")


async def _large_body() -> AsyncIterator[bytes]:
    for _ in range(PIECES):
        yield PIECE


@pytest.mark.parametrize("end", ["close", "reset", "reads on"])
@pytest.mark.parametrize("transport", ["TCP", "TLS 1.2", "TLS 1.3"])
async def test_early_response_is_read_however_the_server_ends_the_connection(
    endpoint_at: EndpointAt, transport: str, end: str
) -> None:
    context = None if transport == "TCP" else server_context()
    if context is not None and transport == "TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    results: Counter[str] = Counter()

    def refuse(sock: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(4096)
        sock.sendall(REFUSAL)
        if end == "reset":
            reset_on_close(sock)
        elif end == "reads on":
            for _ in range(20):
                sock.recv(64 * 1024)

    with blocking_server(refuse, context) as url:
        endpoint = endpoint_at(url)
        for _ in range(ROUNDS):
            try:
                reply = await call(endpoint, _large_body())
                results[f"{reply.status} {reply.body.decode()}"] += 1
            except GatewayError as error:
                results[error.message] += 1
        await until(lambda: not endpoint._open)  # the server's end blocks the event loop
    assert results == {"413 no": ROUNDS}
