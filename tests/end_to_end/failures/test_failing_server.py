"""A server that fails: errors name it, and truncated responses are recognizable."""

import asyncio

import pytest

from tests.support.gateway import UPSTREAM
from tests.support.http_messages import chunk, http_response, request
from tests.support.inference_messages import FLOATS, binary_header, infer_binary, infer_json
from tests.support.servers.scripted_server import Connection, Script, never_respond
from tests.support.servers.served import served

GET = request("GET", "/v2/models/m")
JSON = infer_json()
BINARY = infer_binary(binary_header(12, binary_output=True), FLOATS.tobytes())
EVERY_KIND = {"GET": GET, "json": JSON, "binary": BINARY}

HEAD_OF_10 = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nContent-Type: text/plain\r\n\r\n"
HEAD_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/plain\r\n\r\n"


async def close_at_once(connection: Connection) -> None:
    await connection.close()


def says(*parts: bytes, then: str = "closes") -> Script:
    """Return a script that reads a request, sends this, and closes, resets or waits."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(*parts)
        if then == "resets":
            await asyncio.sleep(0.05 * len(parts))
            connection.reset()
        elif then == "waits":
            await connection.wait_for_close()

    return script


NO_ANSWER = {
    "closes at once": close_at_once,
    "closes after the request": says(),
    "resets": says(then="resets"),
    "closes in the headers": says(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConte"),
    "has huge headers": says(
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", then="waits"
    ),
    "switches protocols": says(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
        then="waits",
    ),
}


@pytest.mark.parametrize("data", EVERY_KIND.values(), ids=EVERY_KIND)
@pytest.mark.parametrize("script", NO_ANSWER.values(), ids=NO_ANSWER)
async def test_missing_response_is_a_502_that_names_the_server(data: bytes, script: Script) -> None:
    async with served(script) as (server, _, client):
        reply = await client.ask(data)
        assert reply.status == 502
        assert UPSTREAM in reply.error
        assert server.url not in reply.error
        assert "\n" not in reply.error


CUT_SHORT = {
    "closes": says(HEAD_OF_10 + b"12345"),
    "closes between chunks": says(HEAD_CHUNKED + chunk(b"12345")),
    "closes in a chunk": says(HEAD_CHUNKED + b"a\r\n12345"),
    "has more in a chunk than it says": says(
        HEAD_CHUNKED, b"3\r\n12345\r\n0\r\n\r\n", then="waits"
    ),
    "resets": says(HEAD_OF_10 + b"12345", then="resets"),
}


@pytest.mark.parametrize("data", EVERY_KIND.values(), ids=EVERY_KIND)
@pytest.mark.parametrize("script", CUT_SHORT.values(), ids=CUT_SHORT)
async def test_truncated_response_is_a_502_or_truncated_for_the_client(
    data: bytes, script: Script
) -> None:
    async with served(script) as (server, _, client):
        await client.send(data)
        try:
            reply = await client.read_response()
        except (ConnectionResetError, asyncio.IncompleteReadError):
            return
        # If the error came in one piece with the start, nothing was sent.
        assert reply.status == 502
        assert UPSTREAM in reply.error
        assert server.url not in reply.error


async def test_truncated_response_is_visible_to_an_http_1_0_client() -> None:
    # Such a client knows the end of a body only by the end of the connection.
    script = CUT_SHORT["closes between chunks"]
    async with served(script) as (_, _, client):
        await client.send(b"GET /v2/models/m HTTP/1.0\r\n\r\n")
        assert (await client.head()).status == 200
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_response_may_arrive_before_the_body_was_sent() -> None:
    """The server refuses the body, and does not read it."""

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.send(http_response(b'{"error":"too large"}', status="413 Too Large"))
        await never_respond(connection)

    async with served(script) as (server, _, client):
        head = request("POST", "/v2/x", headers={"Content-Length": "5000000"})
        await client.send(head + bytes(2_500_000))
        reply = await client.read_response()
        assert reply.status == 413
        assert reply.error == "too large"
        await (await server.connection()).left.wait()


async def test_server_that_closes_during_the_request_body_is_a_502() -> None:
    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.reader.readexactly(100_000)
        connection.reset()

    async with served(script) as (server, _, client):
        client.send_nowait(request("POST", "/v2/x", bytes(20_000_000)))
        reply = await client.read_response()
        assert reply.status == 502
        assert UPSTREAM in reply.error
        assert server.url not in reply.error
