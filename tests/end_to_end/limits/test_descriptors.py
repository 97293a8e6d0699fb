"""A process with few file descriptors: calls that hang and idle clients lock nobody out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.addresses import free_address
from tests.support.gateway_process import TENSORGATE, TIMEOUT, gateway_process
from tests.support.http2_client import Http2Client, open_http2
from tests.support.http_messages import http_response, request
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

LIMIT = 512
"""Open files of each process of the gateway."""
FEW_DESCRIPTORS = ("bash", "-c", f'ulimit -n {LIMIT}; exec "$0" "$@"', TENSORGATE)
STREAMS = 100
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
    admin, file = free_address(), tmp_path / "gateway.yaml"
    async with (
        ScriptedServer(_hang) as hung,
        ScriptedServer(always_respond(http_response(b"fine"))) as good,
    ):
        file.write_text(
            f"listen: 127.0.0.1:0\nadmin: {admin}\nworkers: {workers}\nupstreams:\n"
            f"  hung: {{endpoints: [{hung.url}], dialect: triton}}\n"
            f"  good: {{endpoints: [{good.url}], dialect: triton}}\n"
            "routes:\n  - {match: {model: hangs}, upstream: hung}\n  - upstream: good\n"
        )
        async with gateway_process(str(file), FEW_DESCRIPTORS) as (process, url):
            await process.wait_for_output(r"listening on http://\S+ \(admin\)")
            yield url, f"http://{admin}"


async def _check_served(url: str, admin: str) -> None:
    """Call the good upstream and the probe, each over a connection of its own."""
    async with asyncio.timeout(TIMEOUT):
        for _ in range(20):
            async with connect(url) as client:
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
            async with asyncio.timeout(TIMEOUT):
                while len(_refused(clients)) < 100:  # noqa: ASYNC110  # any client gets them
                    await asyncio.sleep(0.01)
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
        address = urlsplit(url)
        with ExitStack() as stack:
            for _ in range(int(LIMIT * 0.94) * workers):
                sock = stack.enter_context(socket.socket())
                sock.bind(("127.0.0.9", 0))
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(
                    sock, (address.hostname, address.port)
                )
            await _check_served(url, admin)
