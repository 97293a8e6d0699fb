"""A server that fails: errors name it, and truncated responses are recognizable."""

import asyncio

import pytest

from tests.support.gateway import UPSTREAM
from tests.support.http_messages import chunk, http_response, request
from tests.support.inference_messages import FLOATS, binary_header, infer_binary, infer_json
from tests.support.servers.scripted_server import Connection, Script, always_respond, never_respond
from tests.support.servers.served import served

GET = request("GET", "/v2/models/m")
POST = request("POST", "/v2/models/m/generate", b'{"text":"hello"}')
JSON = infer_json()
BINARY = infer_binary(binary_header(12, binary_output=True), FLOATS.tobytes())
EVERY_KIND = {"GET": GET, "json": JSON, "binary": BINARY}

HEAD_OF_10 = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nContent-Type: text/plain\r\n\r\n"
HEAD_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/plain\r\n\r\n"


async def close_at_once(connection: Connection) -> None:
    await connection.close()


async def close_after_request(connection: Connection) -> None:
    await connection.request()


async def reset_after_request(connection: Connection) -> None:
    await connection.request()
    connection.reset()


def says(*parts: bytes) -> Script:
    """Return a script that reads a request, sends this, and closes."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(*parts)

    return script


def says_and_waits(*parts: bytes) -> Script:
    """Return a script that reads a request, sends this, and keeps the connection open."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(*parts)
        await connection.wait_for_close()

    return script


NO_ANSWER: dict[str, Script] = {
    "closes at once": close_at_once,
    "closes after the request": close_after_request,
    "resets": reset_after_request,
    "closes in the headers": says(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConte"),
    "has huge headers": says_and_waits(
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: " + b"x" * 200_000 + b"\r\n\r\n"
    ),
    "switches protocols": says_and_waits(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"
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


CUT_SHORT: dict[str, Script] = {
    "closes": says(HEAD_OF_10 + b"12345"),
    "closes before the body": says(HEAD_OF_10),
    "closes between chunks": says(HEAD_CHUNKED + chunk(b"12345")),
    "closes in a chunk": says(HEAD_CHUNKED + b"a\r\n12345"),
    "closes in a chunk's size": says(HEAD_CHUNKED + chunk(b"12345") + b"1"),
    "has more in a chunk than it says": says_and_waits(HEAD_CHUNKED, b"3\r\n12345\r\n0\r\n\r\n"),
}


async def resets_in_the_body(connection: Connection) -> None:
    await connection.request()
    await connection.send(HEAD_OF_10 + b"12345")
    await asyncio.sleep(0.05)
    connection.reset()


CUT_SHORT["resets"] = resets_in_the_body


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


ERRORS = {
    "422": (b'{"detail":"KServe"}', "422 Unprocessable Entity"),
    "500": (b"not even JSON", "500 Internal Server Error"),
    "503": (b"", "503 Loading"),
}


@pytest.mark.parametrize(("body", "status"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("data", EVERY_KIND.values(), ids=EVERY_KIND)
async def test_error_response_of_the_server_passes_untouched(
    data: bytes, body: bytes, status: str
) -> None:
    server_answer = http_response(body, {"Content-Type": "text/x", "Retry-After": "7"}, status)
    async with served(always_respond(server_answer)) as (_, _, client):
        for _ in range(2):
            reply = await client.ask(data)
            assert reply.head.first == f"HTTP/1.1 {status}"
            assert reply.head.get("Content-Type") == "text/x"
            assert reply.head.get("Retry-After") == "7"
            assert reply.body == body


async def test_error_response_to_head_has_no_body() -> None:
    # It would be taken for the next response.
    async with served(close_after_request) as (_, _, client):
        for _ in range(2):
            await client.send(request("HEAD", "/v2/models/m"))
            head = await client.head()
            assert head.status == 502
            assert int(head.get("Content-Length") or 0) > 0
        assert (await client.ask(GET)).status == 502


@pytest.mark.parametrize("size", [100_000, 5_000_000])
async def test_response_may_arrive_before_the_body_was_sent(size: int) -> None:
    """The server refuses the body, and does not read it."""

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.send(http_response(b'{"error":"too large"}', status="413 Too Large"))
        await never_respond(connection)

    async with served(script) as (server, _, client):
        head = request("POST", "/v2/x", headers={"Content-Length": str(size)})
        await client.send(head + bytes(size // 2))
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


@pytest.mark.parametrize(("keep_alive", "connections"), [("0s", 3), ("1h", 1)])
async def test_connections_to_servers_are_kept_alive(keep_alive: str, connections: int) -> None:
    upstream = {"idle_timeout": keep_alive}
    async with served(always_respond(http_response()), upstream=upstream) as (server, _, client):
        for _ in range(3):
            assert (await client.ask(GET)).status == 200
        assert len(server.connections) == connections
