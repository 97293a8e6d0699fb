"""Compressed requests and responses over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from typing import Any

import pytest

from gateway.codec.decompress import FREE_OUTPUT_BYTES
from tests.support.gateway import gateway_client
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    json_request,
)
from tests.support.raw_client import RawClient
from tests.support.servers.model_scripts import infer_floats
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond
from tests.support.servers.served import served

GENERATE = "/v2/models/m/generate"
ACCEPT = {"Accept-Encoding": "gzip"}
COMPRESS: dict[str, Any] = {"route": {"compression": "gzip"}}
NOISE = random.Random(7).randbytes(300_000)


async def test_compressed_infer_request_is_decoded() -> None:
    header = binary_header(len(NOISE))
    packed = zlib.compress(header + NOISE)
    headers = {HEADER_LENGTH: str(len(header)), "Content-Encoding": "deflate"}
    async with ScriptedServer(infer_floats) as server, gateway_client(server.url) as client:
        assert (await client.call("POST", INFER, packed, headers)).status == 200
        head = {"Host": "x", "Transfer-Encoding": "chunked", **headers}
        await client.send(message(f"POST {INFER} HTTP/1.1", head))
        await client.send(*map(chunk, (packed[:20], packed[20:])), chunk(b""))
        assert (await client.read_response()).status == 200
        for received in server.requests:
            assert received.body.endswith(NOISE)
            assert received.head.get("Content-Length") == str(len(received.body))
            assert received.head.get("Content-Encoding") is None
        assert len(server.requests) == 2


async def _status(client: RawClient, body: bytes, target: str = INFER) -> tuple[int, str]:
    reply = await client.call("POST", target, body, {"Content-Encoding": "gzip"})
    return reply.status, reply.error


@pytest.mark.parametrize("target", [INFER, GENERATE])
async def test_invalid_compressed_body_is_refused(target: str) -> None:
    body = gzip.compress(json_request())
    async with served(max_request_bytes=2 * FREE_OUTPUT_BYTES) as (server, _, client):
        status, why = await _status(client, body[:-1], target)
        assert (status, "ends before its gzip data does" in why) == (400, True)
        status, why = await _status(client, body + b"x", target)
        assert (status, "has data after its gzip data" in why) == (400, True)
        status, why = await _status(
            client, gzip.compress(b" " * FREE_OUTPUT_BYTES * 3 + json_request()), target
        )
        assert (status, "limits.max_decompression_ratio" in why) == (413, True)
        status, why = await _status(client, gzip.compress(b"") * 50_000 + body, target)
        assert (status, "too many tiny members" in why) == (400, True)
        assert server.requests == []
        # The connection stays open.
        assert (await client.call("POST", target, json_request())).status == 200


LARGE = json.dumps({"x": ["y"] * 1000}).encode()


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found"])
async def test_passthrough_response_is_compressed(status: str) -> None:
    data = http_response(LARGE, {"Vary": "Origin"}, status)
    async with served(always_respond(data), **COMPRESS) as (server, _, client):
        for _ in range(2):
            packed = await client.call("GET", "/v2/x", headers=ACCEPT)
            plain = await client.call("GET", "/v2/x")
            assert gzip.decompress(packed.body) == plain.body == LARGE
            assert packed.head.get("Content-Encoding") == "gzip"
            assert plain.head.get("Content-Encoding") is None
            for reply in (packed, plain):
                assert reply.head.get("Vary") == "Origin, Accept-Encoding"
        assert all(each.head.get("Accept-Encoding") is None for each in server.requests)


async def test_truncated_response_is_aborted() -> None:
    larger_than_waited_for = LARGE * (1 + 2**17 // len(LARGE))
    data = http_response(larger_than_waited_for)[:-1]

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(data)

    async with ScriptedServer(script) as server, gateway_client(server.url, **COMPRESS) as client:
        await client.send(request("GET", "/v2/x", headers=ACCEPT))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await client.read_response()
