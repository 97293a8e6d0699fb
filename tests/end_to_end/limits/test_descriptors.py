"""A process with few file descriptors: calls that hang and idle clients lock nobody out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection

from tests.support.gateway import until
from tests.support.gateway_process import TENSORGATE, TIMEOUT
from tests.support.http2_client import Http2Client, open_http2
from tests.support.http_messages import http_response, request
from tests.support.operator import operated_gateway
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

LIMIT = 256
"""Open files of each process of the gateway."""
FEW_DESCRIPTORS = ("bash", "-c", f'ulimit -n {LIMIT}; exec "$0" "$@"', TENSORGATE)
CROWD, OTHER = "127.0.0.9", "127.0.0.2"
"""The addresses of a client with many connections, and of one with few."""
STREAMS = 50
HANGS = "/v2/models/hangs/stats"
CALL = request("GET", "/v2/models/m/stats")

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # the test's own, not the gateway's


async def _hang(connection: Connection) -> None:
    """Respond to health checks alone."""
    while "hangs" not in (await connection.request()).head.first:
        await connection.send(http_response(b""))
    await connection.wait_for_close()


@asynccontextmanager
async def _gateway(tmp_path: Path, workers: int) -> AsyncIterator[tuple[str, str]]:
    """Run a gateway with two upstreams, one of which hangs; yield its URL and the admin URL."""
    async with (
        ScriptedServer(_hang) as hung,
        ScriptedServer(always_respond(http_response(b"fine"))) as good,
    ):
        settings = (
            f"workers: {workers}\nupstreams:\n"
            f"  hung: {{endpoints: [{hung.url}], dialect: triton}}\n"
            f"  good: {{endpoints: [{good.url}], dialect: triton}}\n"
            "routes:\n  - {match: {model: hangs}, upstream: hung}\n  - upstream: good\n"
        )
        async with operated_gateway(tmp_path, settings, FEW_DESCRIPTORS) as gateway:
            yield gateway.url, gateway.operator.url


class _Crowd:
    """A client that sends the same request over each of its connections, and goes on no more."""

    def __init__(self, url: str, request: bytes) -> None:
        address = urlsplit(url)
        self._address = (address.hostname, address.port)
        self._request = request
        self._sockets = ExitStack()

    async def connect(self, count: int) -> None:
        """Open connections; some may be refused, or closed later on."""
        loop = asyncio.get_running_loop()
        for _ in range(count):
            sock = self._sockets.enter_context(socket.socket())
            sock.bind((CROWD, 0))
            sock.setblocking(False)
            with suppress(ConnectionError):
                await loop.sock_connect(sock, self._address)
                await loop.sock_sendall(sock, self._request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets.close()


async def _check_served(url: str, admin: str, own_host: str | None = None) -> None:
    """Call the good upstream and the probe, each over a connection of its own."""
    async with asyncio.timeout(TIMEOUT):
        for _ in range(20):
            async with connect(url, own_host=own_host) as client:
                reply = await client.ask(CALL)
                assert (reply.status, reply.body) == (200, b"fine")
            async with connect(admin) as operator:
                ready = await operator.call("GET", "/ready")
                # Calls that cannot connect make an upstream not ready until its next probe.
                assert ready.status == 200 or "upstream hung" in ready.error


def _refused(clients: list[Http2Client]) -> list[int]:
    return [reply.status for client in clients for reply in client.replies.values() if reply.ended]


@pytest.mark.parametrize("workers", [1, 2])
async def test_calls_that_hang_leave_descriptors_to_others(tmp_path: Path, workers: int) -> None:
    async with _gateway(tmp_path, workers) as (url, admin):
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(open_http2(url)) for _ in range(6 * workers)]
            for client in clients:
                client.begin()
                await client.until_processed()
                for _ in range(STREAMS):
                    client.send_headers("GET", HANGS, end_stream=True, flush=False)
                client.flush()
            await until(lambda: len(_refused(clients)) >= STREAMS, TIMEOUT)
            await _check_served(url, admin)
            assert set(_refused(clients)) == {503}
            reply = next(
                each for client in clients for each in client.replies.values() if each.ended
            )
            assert reply.get("retry-after") == "1"
            assert "Too many open files" in reply.json["error"]
        await _check_served(url, admin)


@pytest.mark.parametrize("workers", [1, 2])
async def test_idle_clients_leave_descriptors_to_others(tmp_path: Path, workers: int) -> None:
    async with _gateway(tmp_path, workers) as (url, admin):
        with _Crowd(url, b"") as crowd:
            await crowd.connect(int(LIMIT * 0.94) * workers)
            await _check_served(url, admin)


def _http2_request(*headers: tuple[str, str]) -> bytes:
    """Return what a client sends up to a request's headers, which a body is to follow."""
    client = H2Connection(H2Configuration())
    client.initiate_connection()
    first = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), *headers]
    client.send_headers(1, first)
    return client.data_to_send()


BUSY = {
    "bodies that never end": request("POST", "/v2/models/m/infer", None, {"Content-Length": "9"}),
    "chunked bodies": request("POST", "/v2/models/m/infer", None, {"Transfer-Encoding": "chunked"}),
    "streams that never end": _http2_request((":path", "/v2/models/m/infer")),
    "gRPC without a first message": _http2_request(
        (":path", "/inference.GRPCInferenceService/ModelStreamInfer"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ),
    "calls that wait": request("GET", HANGS),
}


@pytest.mark.parametrize(
    ("busy", "workers"), [*((busy, 1) for busy in BUSY), ("bodies that never end", 2)]
)
async def test_busy_connections_of_one_client_leave_descriptors_to_others(
    tmp_path: Path, busy: str, workers: int
) -> None:
    async with _gateway(tmp_path, workers) as (url, admin):
        with _Crowd(url, BUSY[busy]) as crowd:
            for _ in range(2):
                await crowd.connect(LIMIT * workers)
                await _check_served(url, admin, OTHER)
