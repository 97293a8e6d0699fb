"""A server that fails: errors name it, and truncated responses are recognizable."""

import asyncio
from functools import partial

import pytest

from gateway.routing.endpoint_health import NOT_EJECTED
from gateway.upstream.http.endpoint import HttpEndpoint
from tests.support.checks.descriptors import no_descriptors
from tests.support.gateway import UPSTREAM, gateway_client, running_gateway, until
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    binary_header,
    binary_response,
    binary_response_header,
    infer_binary,
    infer_json,
    infer_raw,
    metadata,
)
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
)

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
    "closes in the status line": says(b"HTTP/1.1 200"),
    "closes in the headers": says(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConte"),
    "is no HTTP server": says_and_waits(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "has two lengths": says_and_waits(
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!"
    ),
    "has huge headers": says_and_waits(
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: " + b"x" * 200_000 + b"\r\n\r\n"
    ),
    "has control characters in its reason": says_and_waits(
        b"HTTP/1.1 200 O\x01K\r\nContent-Length: 0\r\n\r\n"
    ),
    "switches protocols": says_and_waits(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"
    ),
}


@pytest.mark.parametrize("data", EVERY_KIND.values(), ids=EVERY_KIND)
@pytest.mark.parametrize("script", NO_ANSWER.values(), ids=NO_ANSWER)
async def test_missing_response_is_a_502_that_names_the_server(data: bytes, script: Script) -> None:
    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
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
    "has a word for a chunk's size": says_and_waits(
        HEAD_CHUNKED + chunk(b"12345"), b"five\r\n12345\r\n"
    ),
    "has more in a chunk than it says": says_and_waits(HEAD_CHUNKED, b"3\r\n12345\r\n0\r\n\r\n"),
}


async def resets_in_the_body(connection: Connection) -> None:
    await connection.request()
    await connection.send(HEAD_OF_10 + b"12345")
    await asyncio.sleep(0.05)
    connection.reset()


CUT_SHORT["resets"] = resets_in_the_body


@pytest.mark.parametrize("data", [GET, BINARY], ids=["GET", "binary"])
@pytest.mark.parametrize("script", CUT_SHORT.values(), ids=CUT_SHORT)
async def test_truncated_passthrough_response_is_truncated_for_the_client(
    data: bytes, script: Script
) -> None:
    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
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
    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
        await client.send(b"GET /v2/models/m HTTP/1.0\r\n\r\n")
        assert (await client.head()).status == 200
        with pytest.raises(ConnectionResetError):
            await client.rest()


@pytest.mark.parametrize("script", CUT_SHORT.values(), ids=CUT_SHORT)
async def test_truncated_json_response_is_a_502_if_nothing_was_sent(
    script: Script,
) -> None:
    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
        reply = await client.ask(JSON)
        assert reply.status == 502
        assert UPSTREAM in reply.error
        assert server.url not in reply.error


async def test_truncated_large_json_response_is_truncated_for_the_client() -> None:
    header, tensor = binary_response_header(400_000), bytes(200_000)
    head = {HEADER_LENGTH: str(len(header)), "Content-Length": str(len(header) + 400_000)}
    script = says(message("HTTP/1.1 200 OK", head, header + tensor))
    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
        await client.send(JSON)
        assert (await client.head()).status == 200
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.whole_body()


async def test_host_without_address_is_a_503_that_names_it() -> None:
    url = "http://no-such-host.invalid:8000"
    async with gateway_client(url) as client:
        reply = await client.ask(GET)
        assert reply.status == 503
        assert UPSTREAM in reply.error
        assert "no-such-host" not in reply.error


ERRORS = {
    "422": (b'{"detail":"KServe"}', "422 Unprocessable Entity"),
    "500": (b"not even JSON", "500 Internal Server Error"),
    "503": (b"", "503 Loading"),
}


@pytest.mark.parametrize(("body", "status"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("data", [GET, JSON, BINARY], ids=["GET", "json", "binary"])
async def test_error_response_of_the_server_passes_untouched(
    data: bytes, body: bytes, status: str
) -> None:
    server_answer = http_response(body, {"Content-Type": "text/x", "Retry-After": "7"}, status)
    async with (
        ScriptedServer(always_respond(server_answer)) as server,
        gateway_client(server.url) as client,
    ):
        for _ in range(2):
            reply = await client.ask(data)
            assert reply.head.first == f"HTTP/1.1 {status}"
            assert reply.head.get("Content-Type") == "text/x"
            assert reply.head.get("Retry-After") == "7"
            assert reply.body == body


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified", "200 OK"])
async def test_response_without_a_body_passes(status: str) -> None:
    headers = {"Content-Length": "0"} if status == "200 OK" else {}
    async with (
        ScriptedServer(always_respond(message(f"HTTP/1.1 {status}", headers))) as server,
        gateway_client(server.url) as client,
    ):
        for _ in range(3):
            reply = await client.ask(GET)
            assert reply.head.first == f"HTTP/1.1 {status}"
            assert reply.body == b""
    assert len(server.connections) == 1


async def test_head_response_passes() -> None:
    script = always_respond(message("HTTP/1.1 200 OK", {"Content-Length": "123"}))
    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
        for _ in range(3):
            await client.send(request("HEAD", "/v2/models/m"))
            head = await client.head()
            assert head.status == 200
            assert head.get("Content-Length") == "123"
        # Some servers send a body anyway, which must not become the next response.
        assert len(server.connections) == 3


async def test_error_response_to_head_has_no_body() -> None:
    # It would be taken for the next response.
    async with ScriptedServer(close_after_request) as server, gateway_client(server.url) as client:
        for _ in range(2):
            await client.send(request("HEAD", "/v2/models/m"))
            head = await client.head()
            assert head.status == 502
            assert int(head.get("Content-Length") or 0) > 0
        assert (await client.ask(GET)).status == 502


async def test_bytes_after_a_response_are_never_taken_for_another() -> None:
    unasked = http_response(b'"unasked"')

    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            await connection.send(http_response(b'"%s"' % received.head.target.encode()) + unasked)

    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
        for number in range(5):
            reply = await client.ask(request("GET", f"/v2/models/m{number}"))
            assert reply.json == f"/v2/models/m{number}"


async def test_response_on_an_idle_connection_is_never_taken_for_another() -> None:
    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            await connection.send(http_response(b'"%s"' % received.head.target.encode()))
            await asyncio.sleep(0.05)  # until the connection is idle
            await connection.send(http_response(b'"unasked"'))
            sent.append(connection)

    sent: list[Connection] = []
    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url) as gateway,
        gateway.client() as client,
    ):
        (endpoint,) = gateway.pool.endpoints
        assert isinstance(endpoint, HttpEndpoint)

        def unasked_is_there(number: int) -> bool:
            waiting = [connection for _, connection in endpoint.idle._waiting]
            return len(sent) > number and not any(each.reusable for each in waiting)

        for number in range(3):
            reply = await client.ask(request("GET", f"/v2/models/m{number}"))
            assert reply.json == f"/v2/models/m{number}"
            await until(partial(unasked_is_there, number))


async def test_connection_is_reused_after_errors_and_all_encodings() -> None:
    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            if received.head.target.endswith("/infer"):
                await connection.send(binary_response(FLOATS.tobytes()))
            else:
                await connection.send(http_response(metadata(-1)))

    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
        for data in (GET, JSON, BINARY, infer_raw(bytes(8)), POST) * 3:
            assert (await client.ask(data)).status == 200
    assert len(server.connections) == 1


@pytest.mark.parametrize(("keep_alive", "connections"), [("0s", 3), ("1h", 1)])
async def test_connections_to_servers_are_kept_alive(keep_alive: str, connections: int) -> None:
    async with (
        ScriptedServer(always_respond(http_response())) as server,
        running_gateway(server.url, upstream={"idle_timeout": keep_alive}) as gateway,
        gateway.client() as client,
    ):
        for _ in range(3):
            assert (await client.ask(GET)).status == 200
        assert len(server.connections) == connections
        (endpoint,) = gateway.pool.endpoints
        assert isinstance(endpoint, HttpEndpoint)
        now = asyncio.get_running_loop().time()
        assert all(expires > now + 3590 for expires, _ in endpoint.idle._waiting)


@pytest.mark.parametrize("size", [100_000, 5_000_000])
async def test_response_may_arrive_before_the_body_was_sent(size: int) -> None:
    """The server refuses the body, and does not read it."""

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.send(http_response(b'{"error":"too large"}', status="413 Too Large"))
        await never_respond(connection)

    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
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

    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url) as gateway,
        gateway.client() as client,
    ):
        client.send_nowait(request("POST", "/v2/x", bytes(20_000_000)))
        reply = await client.read_response()
        assert reply.status == 502
        assert UPSTREAM in reply.error
        assert server.url not in reply.error


async def test_slow_response_arrives_complete() -> None:
    data = binary_response(FLOATS.tobytes())

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(*(data[i : i + 1] for i in range(len(data))))

    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
        reply = await client.ask(JSON)
        assert reply.json["outputs"][0]["data"] == [1.5, -2, 3e30]


async def test_lack_of_file_descriptors_ejects_no_server() -> None:
    good = always_respond(http_response(b"fine"))
    async with (
        ScriptedServer(good) as one,
        ScriptedServer(good) as other,
        running_gateway(one.url, other.url) as gateway,
        gateway.client() as client,
    ):
        with no_descriptors():
            for _ in range(8):
                reply = await client.ask(GET)
                assert (reply.status, reply.head.get("Retry-After")) == (503, "1")
                assert reply.error.startswith("the gateway is out of local resources")
        assert [member.ejection for member in gateway.pool.members] == [NOT_EJECTED, NOT_EJECTED]
        assert (await client.ask(GET)).body == b"fine"
        # One server has an idle connection now, which takes what cannot go to the other.
        with no_descriptors():
            assert [(await client.ask(GET)).status for _ in range(8)] == [200] * 8
        assert sorted((len(one.requests), len(other.requests))) == [0, 9]
