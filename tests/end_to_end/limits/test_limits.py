"""Timeouts and sizes of a call: the error names the limit, and the late side."""

import asyncio
from contextlib import suppress

import pytest

from tests.support.gateway import (
    UPSTREAM,
    gateway_before,
    gateway_client,
    http1_connections,
    served,
    until,
)
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
)
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, always_respond, never_respond

# On one loop only: these tests wait.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

SHORT = 0.25
LONGER = 1.0
"""Seconds for what must happen before the timeout."""

GET = request("GET", "/v2/models/m/stats")
POST = request("POST", "/v2/x", bytes(10))
POST_CHUNKED = message(
    "POST /v2/x HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"}, chunk(b"x") + chunk(b"")
)
CHUNKED_HEAD = message(f"POST {INFER} HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
JSON = infer_json()
BINARY = infer_binary(binary_header(12), FLOATS.tobytes())
RAW = infer_raw(bytes(8))


@pytest.mark.parametrize(
    ("data", "limit"), [(POST_CHUNKED, "idle_timeout"), (GET, "request_timeout")]
)
async def test_call_after_one_that_timed_out_takes_another_connection(
    data: bytes, limit: str
) -> None:
    """The server may answer the first one late, on its connection."""

    async def hangs_later(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response(b"first"))
        await connection.request()
        await connection.wait_for_close()

    async with served(hangs_later, always_respond(http_response(b"second")), **{limit: SHORT}) as (
        server,
        _,
        client,
    ):
        assert (await client.ask(data)).body == b"first"
        assert (await client.ask(data)).status == 504
        assert [(await client.ask(data)).body for _ in range(3)] == 3 * [b"second"]
        await server.connections[0].left.wait()
        assert len(server.connections) == 2


async def test_server_that_stops_reading_is_a_504_that_names_it() -> None:
    async def script(connection: Connection) -> None:
        await connection.head()
        await asyncio.sleep(5)

    async with served(script, idle_timeout=LONGER) as (server, _, client):
        client.send_nowait(request("POST", "/v2/x", bytes(20_000_000)))
        reply = await client.read_response()
        assert reply.status == 504
        assert UPSTREAM in reply.error
        assert server.url not in reply.error


@pytest.mark.parametrize(
    ("data", "limit"),
    [
        (JSON[:-1], "idle_timeout"),
        (BINARY[:-1], "idle_timeout"),
        (CHUNKED_HEAD, "idle_timeout"),
        (POST_CHUNKED[:-5], "idle_timeout"),
        (POST_CHUNKED[:-5], "request_timeout"),
    ],
)
async def test_client_that_stops_sending_is_a_408(data: bytes, limit: str) -> None:
    async with served(**{limit: SHORT}) as (server, _, client):
        await client.send(data)
        reply = await client.read_response()
        assert reply.status == 408
        assert reply.error.startswith("waiting for the client")
        assert f"limits.{limit}" in reply.error
        assert server.requests == []


async def _until_reset(client: RawClient) -> int:
    """Read to the end of a connection that is reset; return how many bytes came."""
    size = 0
    with suppress(ConnectionResetError):
        async with asyncio.timeout(5):
            while piece := await client.reader.read(65536):
                size += len(piece)
    return size


@pytest.mark.parametrize("data", [GET, JSON], ids=["GET", "json"])
async def test_client_that_never_reads_is_dropped(data: bytes) -> None:
    big = binary_response(bytes(30_000_000))

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(big)
        await never_respond(connection)

    async with (
        gateway_before(script, idle_timeout=LONGER) as (server, gateway),
        gateway.client() as client,
    ):
        await client.send(data)
        assert (await client.head()).status == 200
        await gateway.until_idle()
        await (await server.connection()).left.wait()
        assert await _until_reset(client) < 30_000_000


async def test_slow_progress_is_not_idle() -> None:
    """Many steps, each shorter than the limit, longer together."""
    pauses = 5

    async def script(connection: Connection) -> None:
        received = await connection.request()
        assert received.body == b"x" * pauses
        head = {"Transfer-Encoding": "chunked"}
        await connection.send(message("HTTP/1.1 200 OK", head))
        for _ in range(pauses):
            await asyncio.sleep(LONGER / 4)
            await connection.send(chunk(b"y"))
        await connection.send(chunk(b""))

    async with served(script, idle_timeout=LONGER) as (_, _, client):
        await client.send(request("POST", "/v2/x", headers={"Content-Length": str(pauses)}))
        for _ in range(pauses):
            await asyncio.sleep(LONGER / 4)
            await client.send(b"x")
        assert (await client.read_response()).body == b"y" * pauses


async def test_keep_alive_connection_is_not_idle() -> None:
    async with served(idle_timeout=LONGER, request_timeout=LONGER) as (_, _, client):
        assert (await client.ask(GET)).status == 200
        await asyncio.sleep(LONGER * 1.5)
        assert (await client.ask(GET)).status == 200


async def test_connecting_counts_towards_the_connect_timeout(unused_backlog: str) -> None:
    async with gateway_client(unused_backlog, connect_timeout=SHORT) as client:
        for data in (GET, POST, JSON, BINARY, RAW):
            reply = await client.ask(data)
            assert reply.status == 503
            assert reply.error == f"cannot connect to {UPSTREAM}: no connection in time"


@pytest.mark.parametrize("before", [b"", GET], ids=["at once", "later"])
async def test_incomplete_head_times_out(before: bytes) -> None:
    async with served(request_header_timeout=SHORT) as (_, _, client):
        if before:
            assert (await client.ask(before)).status == 200
        await client.send(GET[:-2])
        reply = await client.read_response()
        assert reply.status == 408
        assert "did not arrive within 0.25 s (limits.request_header_timeout)" in reply.error
        assert await client.rest() == b""


async def test_empty_lines_do_not_keep_a_connection_open() -> None:
    async with served(keep_alive_timeout="1s") as (_, _, client):

        async def send_empty_lines() -> None:
            while True:
                client.send_nowait(b"\r\n")
                await asyncio.sleep(0.05)

        sending = asyncio.create_task(send_empty_lines())
        with suppress(ConnectionResetError):
            assert await client.rest() == b""
        sending.cancel()


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}], ids=["kept", "closed"])
async def test_client_that_leaves_a_response_unread_is_dropped(headers: dict[str, str]) -> None:
    """The response is complete for the gateway, so that no call waits for the client."""
    size = 60_000
    async with (
        gateway_before(
            always_respond(http_response(bytes(size))), idle_timeout=LONGER, keep_alive_timeout="1h"
        ) as (_, gateway),
        gateway.client() as client,
    ):
        client.stop_reading()
        listener = gateway.gateway.listener
        await client.send(request("GET", "/v2/x"))
        await until(lambda: listener._connections)
        (connection,) = http1_connections(listener)

        async def is_full() -> int:
            await client.send(request("GET", "/v2/x"))
            await gateway.until_idle()
            return connection.unsent

        await until(is_full)
        await client.send(request("GET", "/v2/x", headers=headers))
        await until(lambda: connection.unsent > size and not listener.requests)
        assert listener.buffers.buffered > size
        await until(lambda: not listener.connections)
        assert listener.buffers.buffered == 0


# -------------------------------------------------------------------------------------------- sizes

KIB = 1024


@pytest.mark.parametrize("target", [INFER, "/v2/x"], ids=["infer", "passthrough"])
async def test_request_bytes_are_capped(target: str) -> None:
    chunked = message(f"POST {target} HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
    body = json_request().ljust(KIB)
    async with gateway_before(max_request_bytes=KIB) as (server, gateway):
        too_large = (
            [request("POST", target, headers={"Content-Length": str(KIB + 1)})],
            [chunked + chunk(b" " * KIB), chunk(b"x")],
        )
        for parts in too_large:
            async with gateway.client() as client:
                await client.send(*parts)
                reply = await client.read_response()
            assert reply.status == 413
            assert "1024 bytes (limits.max_request_bytes)" in reply.error
        assert server.requests == []
        for data in (request("POST", target, body), chunked + chunk(body) + chunk(b"")):
            async with gateway.client() as client:
                assert (await client.ask(data)).status == 200


def _padded(size: int) -> bytes:
    """Return a request whose JSON around the data has about this size."""
    return json_request()[:-1] + b',"parameters":{"x":"%s"}}' % (b"x" * size)


@pytest.mark.parametrize("size", [KIB, 200_000])
async def test_header_bytes_of_a_request_are_capped(size: int) -> None:
    async with served(max_inference_header_bytes=KIB) as (server, _, client):
        for data in (infer_json(_padded(size)), infer_binary(_padded(size), b"")):
            reply = await client.ask(data)
            assert reply.status == 413
            assert "1024 bytes (limits.max_inference_header_bytes)" in reply.error
        assert server.requests == []
