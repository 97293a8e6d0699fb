"""Requests that are invalid, unusual or ambiguous HTTP: a 4xx that says why, or the right request.

tests/http1 has all spellings that are refused; here are those of each kind, with a request behind
them, in one write and byte by byte. A refused request reaches no server, and nothing behind it gets
a response. An accepted request reaches the server as one unambiguous message.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from gateway.observe.call_record import CallRecord
from tests.end_to_end.connections.smuggled_requests import (
    ACCEPTED,
    INNER,
    REFUSED,
    SIZE,
    Accepted,
    _chunks,
    _post,
    _sized,
)
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import running_gateway, served, until
from tests.support.http_messages import chunk, chunked, http_response, message, read_chunk, request
from tests.support.inference_messages import HEADER_LENGTH, INFER, infer_json
from tests.support.raw_client import RawClient, ReceivedResponse
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

HOST = "Host: x\r\n"


def _get(line: str = "GET /v2/models/m HTTP/1.1", headers: str = HOST) -> bytes:
    return f"{line}\r\n{headers}\r\n".encode("latin-1")


@pytest.mark.parametrize("target", [INFER, "/v2/models/m/generate"])
@pytest.mark.parametrize("rest", [b"five\r\nhello\r\n", b"3\r\nhello\r\n"])
async def test_broken_chunk_after_some_time_is_a_400(rest: bytes, target: str) -> None:
    head = message(f"POST {target} HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
    async with served() as (server, gateway, client):
        await client.send(head + chunk(b'{"inputs":['))
        await until(lambda: gateway.gateway.listener.requests)
        client.send_nowait(rest)
        reply = await client.read_response()
        assert reply.status == 400
        assert "body is malformed" in reply.error
        assert server.requests == []


@pytest.mark.parametrize(
    "line",
    ["SSH-2.0-OpenSSH_9.6", "hello", "DESCRIBE / RTSP/1.0", "INVALID CONNECTION PREFACE\r\n"],
)
async def test_other_protocols_get_no_response(line: str, call_records: list[CallRecord]) -> None:
    """RFC 9113, section 3.4: a wrong preface is no request of HTTP/1.1."""
    async with served() as (_, _, client):
        client.send_nowait(f"{line}\r\n".encode())
        assert await client.rest() == b""
    (record,) = call_records
    assert (record.status, record.error) == (0, "malformed HTTP request: this is not HTTP")


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        ("/v2/models/a%2Fb/ready?x=%20&y=+", "/v2/models/a%2Fb/ready?x=%20&y=+"),
        ("//v2/models/../m/./ready", "//v2/models/../m/./ready"),
        ("/v2/models/@{}[]|^`\\'\"<>~!$&()*,;=%zz%", "/v2/models/@{}[]|^`\\'\"<>~!$&()*,;=%zz%"),
        ("HTTP://elsewhere:80/v2//m?x=1", "/v2//m?x=1"),
        ("http://elsewhere?x=/y", "/?x=/y"),
    ],
)
async def test_target_reaches_the_server_byte_for_byte(target: str, sent: str) -> None:
    async with served() as (server, _, client):
        client.send_nowait(_get(f"GET {target} HTTP/1.1"))
        assert (await client.read_response()).status == 200
        assert [received.head.target for received in server.requests] == [sent]


async def test_http_1_0_request_is_served_and_keep_alive_honored() -> None:
    async with served(always_respond(http_response(b'"old"'))) as (server, _, client):
        first = b"GET /v2/models/m HTTP/1.0\r\n"
        await client.send(first + b"Connection: keep-alive\r\n\r\n")
        assert (await client.read_response()).json == "old"
        await client.send(first + b"\r\n")
        assert (await client.rest()).endswith(b'\r\n\r\n"old"')
        assert server.requests[0].head.first == "GET /v2/models/m HTTP/1.1"


async def test_chunked_response_to_http_1_0_ends_with_the_connection() -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"old") + chunk(b"")
    async with served(always_respond(data)) as (_, _, client):
        client.send_nowait(b"GET /v2/models/m HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        head = await client.head()
        assert head.get("Transfer-Encoding") is None
        assert await client.rest() == b"old"


@pytest.mark.parametrize("data", [infer_json(), request("POST", "/v2/x", b"hello")])
async def test_client_that_expects_100_continue_gets_it(data: bytes) -> None:
    head, _, body = data.partition(b"\r\n\r\n")
    async with served() as (server, _, client):
        for _ in range(2):
            await client.send(head + b"\r\nExpect: 100-continue\r\n\r\n")
            assert (await client.head()).first == "HTTP/1.1 100 Continue"
            await client.send(body)
            assert (await client.read_response()).status == 200
        for received in server.requests:
            assert received.head.get("Expect") is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Content-Length": "100000000"}, 413), ({"Content-Length": "9", HEADER_LENGTH: "x"}, 400)],
)
async def test_client_that_expects_100_continue_gets_the_error(
    headers: dict[str, str], status: int
) -> None:
    async with served() as (server, _, client):
        await client.send(request("POST", INFER, headers={"Expect": "100-continue", **headers}))
        reply = await client.read_response()
        assert reply.status == status
        # The client may send the body or not: closing the connection is the only clear end.
        assert reply.head.get("Connection") == "close"
        assert server.requests == []


GONE = (asyncio.IncompleteReadError, ConnectionError)


async def _send(client: RawClient, data: bytes, way: str) -> None:
    with suppress(ConnectionError):  # the gateway may have closed the connection
        if way == "whole":
            await client.send(data)
        else:
            await client.send(*(data[i : i + 1] for i in range(min(len(data), 3000))), data[3000:])


async def _replies(client: RawClient) -> list[ReceivedResponse]:
    """Read all responses up to the end of the connection."""
    replies = []
    with suppress(*GONE):
        while True:
            replies.append(await client.read_response())
    return replies


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_ambiguous_request_is_refused(data: bytes) -> None:
    async with ScriptedServer() as server, running_gateway(server.url) as gateway:
        for way in ("whole", "bytewise"):
            async with gateway.client() as client:
                await _send(client, data, way)
                (reply,) = await _replies(client)
                assert reply.status == 400, way
                assert reply.error
        assert server.requests == []


@pytest.mark.parametrize("way", ["whole", "bytewise"])
@pytest.mark.parametrize("case", ACCEPTED.values(), ids=ACCEPTED)
async def test_accepted_request_is_one_request(case: Accepted, way: str) -> None:
    async with served() as (server, _, client):
        # With an idle connection and without one: the fast path and the streaming path.
        for number in range(2):
            await _send(client, case.data, way)
            reply = await client.read_response()
            if reply.status == 100:
                reply = await client.read_response()
            assert reply.status == 200
            assert len(server.requests) == number + 1
            received = server.requests[number]
            assert (received.head.first, received.body) == (case.first, case.body)
            for name, value in case.headers:
                assert received.head.get(name) == value
        # The next response is to the request that really comes next.
        assert (await client.call("GET", "/v2/next")).status == 200
        assert server.requests[-1].head.target == "/v2/next"
        assert len(server.requests) == 3


@pytest.mark.parametrize("way", ["whole", "bytewise"])
async def test_infer_request_contains_no_other(way: str) -> None:
    for lines, body in (
        ([b"Content-Length: %d" % SIZE], INNER),
        ([b"Transfer-Encoding: chunked"], chunked(INNER)),
        ([b"Content-Length: %d" % SIZE, HEADER_LENGTH.encode() + b": 0"], INNER),
        ([b"Content-Length: %d" % SIZE, HEADER_LENGTH.encode() + b": 2"], INNER),
    ):
        async with served() as (server, _, client):
            await _send(client, _post(*lines, body=body, target=INFER.encode()), way)
            client.shutdown_write()
            assert [reply.status >= 400 for reply in await _replies(client)] in ([True], [])
            assert "/v2/smuggled" not in [received.head.target for received in server.requests]


@pytest.mark.parametrize("size", [b"f" * 16, b"7fffffffffffffff"])
async def test_bytes_after_a_huge_chunk_size_belong_to_the_chunk(size: bytes) -> None:
    received = b""

    async def script(connection: Connection) -> None:
        nonlocal received
        assert (await connection.head()).get("Transfer-Encoding") == "chunked"
        with suppress(*GONE):
            while piece := await read_chunk(connection.reader):
                received += piece

    upstream = {"dialect": "kserve"}  # the server gets chunks as they arrive
    async with served(script, upstream=upstream) as (_, _, client):
        await client.send(_chunks(size + b"\r\n" + INNER), INNER)
        await until(lambda: received == 2 * INNER)
        client.reset()


async def test_ambiguous_request_after_a_valid_one_is_refused() -> None:
    """The first request gets a response; the ambiguous one ends the connection."""
    async with ScriptedServer() as server, running_gateway(server.url) as gateway:
        for number, data in enumerate(REFUSED.values()):
            async with gateway.client() as client:
                await client.send(_sized() + data)
                assert [reply.status for reply in await _replies(client)] in ([200, 400], [200])
            received = [(each.head.target, each.body) for each in server.requests[number:]]
            assert received == [("/v2/x", INNER)]
