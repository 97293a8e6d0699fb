"""What the gateway changes in requests and responses, and what passes, as fast as it is read."""

from __future__ import annotations

import asyncio
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from tests.support.certificates import (
    authority,
    ca_file,
    certificate_files,
    server_certificate,
    server_context,
)
from tests.support.gateway import UPSTREAM, gateway_client, served
from tests.support.http_messages import (
    chunk,
    chunked,
    http_response,
    message,
    read_head,
    request,
    with_long_head,
)
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    binary_response_header,
    infer_binary,
    infer_json,
    json_request,
    metadata,
)
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    always_respond,
    never_respond,
)

HOP_BY_HOP = (
    b"Connection: keep-alive, X-Hop\r\n"
    b"X-Hop: 1\r\n"
    b"Keep-Alive: timeout=5\r\n"
    b"Proxy-Connection: keep-alive\r\n"
    b"Proxy-Authorization: Basic eA==\r\n"
    b"Proxy-Authenticate: Basic\r\n"
    b"TE: trailers\r\n"
    b"Trailer: X-T\r\n"
    b"Upgrade: h2c\r\n"
)
END_TO_END = b"X-Two: a\r\nX-Two: b\r\nx-tenant: blue\r\nCookie: c=d\r\nAuthorization: Bearer t\r\n"
DROPPED = [line.split(b":")[0].decode() for line in HOP_BY_HOP.splitlines()]


def _with_headers(data: bytes, headers: bytes) -> bytes:
    first, _, rest = data.partition(b"\r\n")
    return first + b"\r\n" + headers + rest


@pytest.mark.parametrize(
    "data",
    [
        request("GET", "/v2/models/m/stats"),
        request("POST", "/v2/x", b"x"),
        infer_json(),
        infer_binary(binary_header(4), bytes(4)),
    ],
    ids=["GET", "POST", "json", "binary"],
)
async def test_end_to_end_request_headers_pass(data: bytes) -> None:
    async with served(always_respond(http_response(b'{"outputs":[]}'))) as (server, _, client):
        reply = await client.ask(_with_headers(data, HOP_BY_HOP + END_TO_END))
        assert reply.status == 200
        head = server.requests[0].head
        for name in DROPPED:
            assert head.all(name) == []
        assert head.all("X-Two") == ["a", "b"]
        assert head.get("x-tenant") == "blue"
        assert head.get("Cookie") == "c=d"
        assert head.get("Authorization") == "Bearer t"
        assert head.get("Host") == "localhost"
        for name in ("User-Agent", "Accept", "Accept-Encoding"):
            assert head.get(name) is None  # no Content-Type that the client did not send


async def test_end_to_end_response_headers_pass() -> None:
    data = _with_headers(
        http_response(b'{"outputs":[]}'),
        HOP_BY_HOP + b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nServer: triton\r\nDate: then\r\n",
    )
    async with served(always_respond(data)) as (_, _, client):
        for query in (request("GET", "/v2/x"), infer_json()):
            head = (await client.ask(query)).head
            for name in DROPPED:
                assert head.all(name) == []
            assert head.all("Set-Cookie") == ["a=1", "b=2"]
            assert head.get("Server") == "triton"
            assert head.get("Date") == "then"


async def test_json_request_reaches_the_server_in_binary() -> None:
    async with served(always_respond(binary_response(FLOATS.tobytes()))) as (server, _, client):
        headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}
        reply = await client.ask(infer_json(headers=headers))
        assert reply.status == 200
        assert reply.head.get("Content-Type") == "application/json"
        assert reply.head.get(HEADER_LENGTH) is None
        assert reply.json["outputs"][0]["data"] == [1.5, -2, 3e30]
        received = server.requests[0]
        size = int(received.head.get(HEADER_LENGTH) or 0)
        assert received.head.get("Content-Type") == "application/octet-stream"
        assert received.head.get("Content-Length") == str(len(received.body))
        assert received.head.get("Accept-Encoding") is None  # the gateway reads the response
        assert received.body[size:] == FLOATS.tobytes()
        fields = json.loads(received.body[:size])
        assert fields["parameters"] == {"binary_data_output": True}


async def test_binary_call_passes_byte_for_byte() -> None:
    header, tensors = binary_header(12, binary_output=True), FLOATS.tobytes()
    data = binary_response(FLOATS.tobytes(), headers={"Content-Encoding": "identity"})
    async with served(always_respond(data)) as (server, _, client):
        reply = await client.ask(infer_binary(header, tensors, {"Accept-Encoding": "gzip"}))
        assert reply.body == data.partition(b"\r\n\r\n")[2]
        assert reply.head.get(HEADER_LENGTH) == str(len(reply.body) - 12)
        received = server.requests[0]
        assert received.body == header + tensors
        assert received.head.get(HEADER_LENGTH) == str(len(header))
        assert received.head.get("Accept-Encoding") == "gzip"


async def test_binary_extension_is_added_to_server_metadata() -> None:
    fields = {"name": "triton", "version": "2", "extensions": ["statistics"]}
    head = {"Transfer-Encoding": "chunked", "X-Kept": "1"}
    data = message("HTTP/1.1 200 OK", head, chunked(json.dumps(fields).encode()))
    async with served(always_respond(data)) as (server, _, client):
        for target in ("/v2", "/v2/", "/v2?x"):
            reply = await client.call("GET", target, headers={"Accept-Encoding": "gzip"})
            assert reply.head.get("X-Kept") == "1"
            assert reply.json == {**fields, "extensions": ["statistics", "binary_tensor_data"]}
        assert server.requests[0].head.get("Accept-Encoding") is None


async def _infer_both_ways(client: RawClient, server: ScriptedServer, fast_path: list[str]) -> None:
    data = infer_json()
    for number, sent in enumerate((with_long_head(data), data)):
        assert fast_path == []
        reply = await client.ask(sent)
        assert reply.status == 200
        assert np.array(reply.json["outputs"][0]["data"], "<f4").tolist() == FLOATS.tolist()
        received = server.requests[number]
        assert received.body.endswith(FLOATS.tobytes())
        assert received.head.get(HEADER_LENGTH) is not None
    assert fast_path == [INFER]
    assert len(server.connections) == 1


async def _infer_large(client: RawClient, server: ScriptedServer) -> None:
    """Send a request that neither arrives nor leaves in one piece."""
    values = np.arange(100_000, dtype="<f4")
    reply = await client.ask(infer_json(json_request(*values.tolist())))
    assert reply.status == 200
    assert server.requests[-1].body.endswith(values.tobytes())


async def test_json_infer_over_https(tmp_path: Path, fast_path_requests: list[str]) -> None:
    certificate = server_certificate("triton.example")
    context = server_context(certificate, clients=authority())
    files = dict(zip(("certificate", "key"), certificate_files(tmp_path), strict=True))
    async with ScriptedServer(
        always_respond(binary_response(FLOATS.tobytes())), ssl=context
    ) as server:
        tls = {"ca": ca_file(tmp_path), "server_name": "triton.example", **files}
        async with gateway_client(server.url, upstream={"tls": tls}) as client:
            await _infer_both_ways(client, server, fast_path_requests)
            await _infer_large(client, server)
        # Without TLS settings, the certificates of the system are trusted.
        async with gateway_client(server.url) as client:
            reply = await client.ask(infer_json())
            assert reply.status == 503
            error = f"cannot connect to {UPSTREAM}: its certificate is not trusted ("
            assert reply.error.startswith(error)


async def test_json_infer_over_a_unix_socket(tmp_path: Path, fast_path_requests: list[str]) -> None:
    path = str(tmp_path / "server")
    async with (
        ScriptedServer(always_respond(binary_response(FLOATS.tobytes())), path=path) as server,
        gateway_client(f"unix:{path}") as client,
    ):
        await _infer_both_ways(client, server, fast_path_requests)
        await _infer_large(client, server)
    async with gateway_client(f"unix:{path}s") as client:
        reply = await client.ask(infer_json())
        assert reply.status == 503
        assert reply.error == f"cannot connect to {UPSTREAM}: No such file or directory"


async def test_certificates_are_not_verified_if_switched_off() -> None:
    context = server_context(server_certificate("triton.example"))
    async with (
        ScriptedServer(always_respond(binary_response(FLOATS.tobytes())), ssl=context) as server,
        gateway_client(server.url, upstream={"tls": {"verify": False}}) as client,
    ):
        assert (await client.ask(infer_json())).status == 200


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
