"""Bodies stream in both directions, no faster than they are read."""

import asyncio
import zlib

import numpy as np
import pytest

from tests.support.gateway import served
from tests.support.http_messages import chunk, http_response, message, read_head, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response_header,
    infer_binary,
    infer_json,
    metadata,
)
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, never_respond

MIB = 2**20

# What the kernel and the event loops may buffer for both connections.
ON_THE_WAY = 80 * MIB
MUCH_MORE = 100 * MIB


async def test_events_arrive_one_by_one() -> None:
    next_event = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        head = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
        await connection.send(message("HTTP/1.1 200 OK", head))
        for number in range(3):
            await next_event.wait()
            next_event.clear()
            await connection.send(chunk(b"data: %d\n\n" % number))
        await connection.send(chunk(b""))

    async with served(script) as (_, _, client):
        await client.send(request("POST", "/v2/models/m/generate_stream", b"{}"))
        head = await client.head()
        assert head.get("Content-Type") == "text/event-stream"
        assert head.get("Content-Length") is None
        for number in range(3):
            next_event.set()
            assert await client.chunk() == b"data: %d\n\n" % number
        assert await client.chunk() == b""


async def _knows_a_model(connection: Connection) -> bytes:
    """Serve model metadata; return the infer request's head and first bytes."""
    while (head := await connection.head()).target in ("/v2/models/m", "/v2/models/m/config"):
        await connection.send(http_response(metadata(-1)))
    return await connection.reader.readexactly(int(head.get(HEADER_LENGTH) or 0) + 8)


@pytest.mark.parametrize("form", ["forward", "binary", "raw"])
async def test_body_reaches_the_server_before_it_is_complete(form: str) -> None:
    body = bytes(range(256)) * 400  # a small request is sent when it is complete
    data = {
        "forward": request("POST", "/v2/x", body),
        "binary": infer_binary(binary_header(len(body)), body),
        "raw": request("POST", INFER, body, {HEADER_LENGTH: "0"}),
    }[form]
    first_part = asyncio.Event()

    async def script(connection: Connection) -> None:
        assert (await _knows_a_model(connection)).endswith(body[:8])
        assert await connection.reader.readexactly(len(body) - 16) == body[8:-8]
        first_part.set()
        assert await connection.reader.readexactly(8) == body[-8:]
        await connection.send(http_response(b'{"outputs":[]}'))

    async with served(script) as (_, _, client):
        await client.send(data[:-8])
        async with asyncio.timeout(5):
            await first_part.wait()
        await client.send(data[-8:])
        assert (await client.read_response()).status == 200


class _Flow:
    """Counts what one end sends until the other stops reading."""

    def __init__(self) -> None:
        self.sent = 0

    async def pour(self, connection: Connection | RawClient, size: int) -> None:
        piece = bytes(65536)
        while self.sent < size:
            await connection.send(piece)
            self.sent += len(piece)

    async def until_it_stands(self) -> None:
        before = -1
        while before != self.sent:
            before = self.sent
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("data", [request("GET", "/v2/x"), infer_json()], ids=["forward", "json"])
async def test_server_is_paused_while_the_client_does_not_read(data: bytes) -> None:
    flow = _Flow()
    header = binary_response_header(MUCH_MORE)
    sizes = {HEADER_LENGTH: str(len(header)), "Content-Length": str(len(header) + MUCH_MORE)}

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(message("HTTP/1.1 200 OK", sizes, header))
        await flow.pour(connection, MUCH_MORE)

    async with served(script) as (_, _, client):
        await client.send(data)
        await client.head()
        await flow.until_it_stands()
        assert 0 < flow.sent < ON_THE_WAY
        # It resumes as soon as the client does.
        stood = flow.sent
        await client.reader.readexactly(8 * MIB)
        await flow.until_it_stands()
        assert flow.sent > stood


@pytest.mark.parametrize("form", ["forward", "binary"])
async def test_client_is_paused_while_the_server_does_not_read(form: str) -> None:
    flow = _Flow()
    header = binary_header(MUCH_MORE)
    data = {
        "forward": request("POST", "/v2/x", headers={"Content-Length": str(MUCH_MORE)}),
        "binary": infer_binary(header, b"", {"Content-Length": str(len(header) + MUCH_MORE)}),
    }[form]

    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.head()
        await go_on.wait()
        await connection.reader.readexactly(MUCH_MORE)
        await connection.send(http_response(b'{"outputs":[]}'))

    async with served(script, max_request_bytes="1GiB") as (_, _, client):
        await client.send(data)
        pouring = asyncio.create_task(flow.pour(client, MUCH_MORE))
        await flow.until_it_stands()
        assert 0 < flow.sent < ON_THE_WAY
        go_on.set()
        await pouring
        assert (await client.read_response()).status == 200


async def test_both_directions_stream_at_once() -> None:
    """The server responds while it reads, as a streaming model may."""
    size = 12 * MIB

    async def script(connection: Connection) -> None:
        await read_head(connection.reader)
        await connection.send(message("HTTP/1.1 200 OK", {"Content-Length": str(size)}))
        left = size
        while left:
            piece = await connection.reader.read(65536)
            left -= len(piece)
            await connection.send(piece)

    body = np.random.default_rng(7).bytes(size)
    async with served(script) as (_, _, client):
        sending = asyncio.create_task(client.send(request("POST", "/v2/x", body)))
        reply = await client.read_response()
        await sending
        assert zlib.crc32(reply.body) == zlib.crc32(body)


async def test_body_that_breaks_during_the_response_aborts_it() -> None:
    async def script(connection: Connection) -> None:
        await read_head(connection.reader)
        head = {"Transfer-Encoding": "chunked"}
        await connection.send(message("HTTP/1.1 200 OK", head, chunk(b"begun")))
        await never_respond(connection)

    async with served(script) as (server, _, client):
        head = {"Host": "x", "Transfer-Encoding": "chunked"}
        await client.send(message("POST /v2/x HTTP/1.1", head, chunk(b"begun")))
        assert (await client.head()).status == 200
        assert await client.chunk() == b"begun"
        await client.send(b"nonsense\r\n")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.chunk()
        await (await server.connection()).left.wait()
