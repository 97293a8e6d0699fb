"""Requests that two readers could parse differently: no request hides in a body.

tests/http1 has all spellings that are refused; here are those of each kind, with a request behind
them. Each request is sent in one write and byte by byte. A refused request reaches no server, and
nothing behind it gets a response. An accepted request reaches the server as one unambiguous
message.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

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
from tests.support.gateway import running_gateway, served, until
from tests.support.http_messages import chunked, read_chunk
from tests.support.inference_messages import HEADER_LENGTH, INFER
from tests.support.raw_client import RawClient, ReceivedResponse
from tests.support.servers.scripted_server import Connection, ScriptedServer

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


async def test_pipelined_requests_are_no_smuggling() -> None:
    async with served() as (server, _, client):
        await client.send(_sized() + _post(b"Content-Length: 0") + _sized() + INNER)
        for _ in range(4):
            assert (await client.read_response()).status == 200
        assert [received.body for received in server.requests] == [INNER, b"", INNER, b""]
