"""Compressed requests and responses over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from typing import Any

import numpy as np
import pytest

from gateway.codec.decompress import FREE_OUTPUT_BYTES
from tests.support.gateway import gateway_client
from tests.support.http_messages import chunk, chunked, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    infer_json,
    json_request,
    metadata,
)
from tests.support.raw_client import RawClient, ReceivedResponse
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

GENERATE = "/v2/models/m/generate"
ACCEPT = {"Accept-Encoding": "gzip"}
COMPRESS: dict[str, Any] = {"route": {"compression": "gzip"}}
NOISE = random.Random(7).randbytes(300_000)
HEADER = binary_header(FLOATS.nbytes)


async def model(connection: Connection) -> None:
    """Respond as a server with a model."""
    while True:
        target = (await connection.request()).head.target
        if target == INFER:
            await connection.send(binary_response(FLOATS.tobytes()))
        else:
            await connection.send(http_response(metadata(-1)))


# ----------------------------------------------------------------------------------------- requests

FORMS: dict[str, tuple[dict[str, str], bytes]] = {
    "JSON": ({}, json_request()),
    "large JSON": ({}, json_request(*range(100_000))),
    "binary": ({HEADER_LENGTH: str(len(HEADER))}, HEADER + FLOATS.tobytes()),
    "large binary": (
        {HEADER_LENGTH: str(len(binary_header(len(NOISE))))},
        binary_header(len(NOISE)) + NOISE,
    ),
    "raw binary": ({HEADER_LENGTH: "0"}, FLOATS.tobytes()),
}


@pytest.mark.parametrize(
    ("form", "coding"),
    [*((form, "gzip") for form in FORMS), ("JSON", "deflate"), ("large binary", "deflate")],
)
async def test_compressed_infer_request_is_decoded(form: str, coding: str) -> None:
    headers, plain = FORMS[form]
    packed = (gzip.compress if coding == "gzip" else zlib.compress)(plain)
    async with ScriptedServer(model) as server, gateway_client(server.url) as client:
        like = await client.call("POST", INFER, plain, headers)
        headers = {**headers, "Content-Encoding": coding}
        reply = await client.call("POST", INFER, packed, headers)
        assert (reply.status, reply.body) == (like.status, like.body) == (200, like.body)
        head = {"Host": "x", "Transfer-Encoding": "chunked", **headers}
        await client.send(message(f"POST {INFER} HTTP/1.1", head))
        await client.send(*map(chunk, (packed[:20], packed[20:])), chunk(b""))
        assert (await client.read_response()).body == like.body
        first, *others = [each for each in server.requests if each.head.target == INFER]
        for received in others:
            assert received.body == first.body
            assert received.head.get(HEADER_LENGTH) == first.head.get(HEADER_LENGTH)
            assert received.head.get("Content-Length") == str(len(first.body))
            assert received.head.get("Content-Encoding") is None
        assert len(others) == 2


async def _status(client: RawClient, body: bytes, target: str = INFER) -> tuple[int, str]:
    reply = await client.call("POST", target, body, {"Content-Encoding": "gzip"})
    return reply.status, reply.error


@pytest.mark.parametrize("target", [INFER, GENERATE])
async def test_invalid_compressed_body_is_refused(target: str) -> None:
    body = gzip.compress(json_request())
    async with (
        ScriptedServer() as server,
        gateway_client(server.url, max_request_bytes=2 * FREE_OUTPUT_BYTES) as client,
    ):
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


async def test_body_beyond_the_decompressed_cap_is_refused() -> None:
    body = gzip.compress(NOISE)
    async with (
        ScriptedServer() as server,
        gateway_client(server.url, max_request_bytes=290_000) as client,
    ):
        status, why = await _status(client, gzip.compress(b" " * 300_000))
        assert (status, "290000 bytes (limits.max_request_bytes)" in why) == (413, True)
        await client.send(request("POST", INFER, body[:9], {"Content-Encoding": "gzip"}))
        assert (await client.read_response()).status == 400
        assert server.requests == []


async def test_unknown_content_coding_is_refused() -> None:
    async with ScriptedServer() as server, gateway_client(server.url) as client:
        for target in (INFER, GENERATE):
            reply = await client.call("POST", target, b"x", {"Content-Encoding": "br"})
            assert (reply.status, "'br'" in reply.error) == (415, True)
            assert reply.head.get("Accept-Encoding") == "gzip, deflate"
        assert server.requests == []


# On one loop only: it waits.
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_broken_compressed_body_is_refused() -> None:
    """Every request gets a response, and never a 500."""
    chance = random.Random(7)
    whole = gzip.compress(json_request(*range(30)))
    async with ScriptedServer(model) as server, gateway_client(server.url) as client:
        for _ in range(200):
            body = bytearray(whole * chance.choice((1, 1, 2)))
            for _ in range(chance.choice((1, 2, 5))):
                at = chance.randrange(len(body))
                odd = chance.randbytes(chance.choice((0, 1, 9)))
                body[at : at + chance.choice((1, 2, 9))] = odd
            headers = {"Content-Encoding": chance.choice(("gzip", "deflate"))}
            reply = await client.call("POST", INFER, bytes(body), headers)
            assert reply.status in (200, 400)


async def test_compressed_request_may_be_cut_at_every_byte() -> None:
    data = infer_json(gzip.compress(json_request()), {"Content-Encoding": "gzip"})
    async with ScriptedServer(model) as server, gateway_client(server.url) as client:
        like = await client.ask(infer_json())
        for at in range(1, len(data)):
            await client.send(data[:at])
            await asyncio.sleep(0)
            assert (await client.ask(data[at:])).body == like.body
        assert len({received.body for received in server.requests}) == 1


# ---------------------------------------------------------------------------------------- responses


def _plain(reply: ReceivedResponse) -> bytes:
    coding = reply.head.get("Content-Encoding")
    assert coding in (None, "gzip")
    return gzip.decompress(reply.body) if coding else reply.body


LARGE = json.dumps({"x": ["y"] * 1000}).encode()
ANSWERS = {
    "sized": http_response(LARGE, {"Vary": "Origin"}),
    "chunked": message(
        "HTTP/1.1 200 OK",
        {"Vary": "Origin", "Transfer-Encoding": "chunked"},
        chunked(LARGE[:9], LARGE[9:]),
    ),
    "an error": http_response(LARGE, {"Vary": "Origin"}, "404 Not Found"),
}


@pytest.mark.parametrize("data", ANSWERS.values(), ids=ANSWERS)
async def test_passthrough_response_is_compressed(data: bytes) -> None:
    async with (
        ScriptedServer(always_respond(data)) as server,
        gateway_client(server.url, **COMPRESS) as client,
    ):
        for _ in range(2):
            reply = await client.call("GET", "/v2/x", headers=ACCEPT)
            assert reply.head.get("Content-Encoding") == "gzip"
            assert reply.head.get("Vary") == "Origin, Accept-Encoding"
            assert _plain(reply) == LARGE
            reply = await client.call("GET", "/v2/x")
            assert reply.head.get("Content-Encoding") is None
            assert reply.head.get("Vary") == "Origin, Accept-Encoding"
            assert reply.body == LARGE
        assert all(each.head.get("Accept-Encoding") is None for each in server.requests)


@pytest.mark.parametrize("count", [500, 100_000])
async def test_converted_response_is_compressed(count: int) -> None:
    tensor = np.arange(count, dtype="<f4").tobytes()
    script = always_respond(binary_response(tensor))
    async with ScriptedServer(script) as server, gateway_client(server.url, **COMPRESS) as client:
        like = await client.ask(infer_json())
        reply = await client.ask(infer_json(headers=ACCEPT))
        assert reply.head.get("Content-Encoding") == "gzip"
        assert _plain(reply) == like.body
        assert len(reply.body) < len(like.body)


async def test_binary_response_is_compressed() -> None:
    tensor = np.arange(50_000, dtype="<f4").tobytes()
    data = binary_response(tensor)
    wanted = json_request()[:-1] + b',"parameters":{"binary_data_output":true}}'
    async with (
        ScriptedServer(always_respond(data)) as server,
        gateway_client(server.url, **COMPRESS) as client,
    ):
        reply = await client.ask(infer_json(wanted, ACCEPT))
        body = data.partition(b"\r\n\r\n")[2]
        assert _plain(reply) == body
        assert reply.head.get("Content-Encoding") == "gzip"
        assert body[int(reply.head.get(HEADER_LENGTH) or 0) :] == tensor


async def test_server_sent_events_are_not_delayed() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        head = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
        await connection.send(message("HTTP/1.1 200 OK", head), chunk(b"data: 1\n\n"))
        await go_on.wait()
        await connection.send(chunk(b"data: 2\n\n"), chunk(b""))

    async with ScriptedServer(script) as server, gateway_client(server.url, **COMPRESS) as client:
        await client.send(request("POST", GENERATE + "_stream", b"{}", ACCEPT))
        head = await client.head()
        assert head.get("Content-Encoding") is None
        assert await client.chunk() == b"data: 1\n\n"
        go_on.set()
        assert await client.whole_body() == b"data: 2\n\n"


async def test_slow_chunks_are_passed_on_at_once() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        head = {"Transfer-Encoding": "chunked"}
        await connection.send(message("HTTP/1.1 200 OK", head), chunk(b"first"))
        await go_on.wait()
        await connection.send(chunk(b"second"), chunk(b""))

    async with ScriptedServer(script) as server, gateway_client(server.url, **COMPRESS) as client:
        await client.send(request("POST", GENERATE, b"{}", ACCEPT))
        assert (await client.head()).get("Content-Encoding") == "gzip"
        unpack = zlib.decompressobj(31)
        seen = b""
        while not seen:  # the JSON before the data arrives first
            seen += unpack.decompress(await client.chunk())
        assert seen == b"first"
        go_on.set()
        assert unpack.decompress(await client.whole_body()) == b"second"
        assert unpack.eof


async def test_http_1_0_client_gets_a_compressed_response() -> None:
    script = always_respond(http_response(LARGE))
    async with ScriptedServer(script) as server, gateway_client(server.url, **COMPRESS) as client:
        data = request("GET", "/v2/x", headers=ACCEPT).replace(b"HTTP/1.1", b"HTTP/1.0")
        await client.send(data)
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"Content-Encoding: gzip" in head
        assert gzip.decompress(body) == LARGE


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


async def test_route_without_compression_lets_the_server_compress() -> None:
    async with (
        ScriptedServer(always_respond(http_response(LARGE))) as server,
        gateway_client(server.url) as client,
    ):
        reply = await client.call("GET", "/v2/x", headers=ACCEPT)
        assert reply.body == LARGE
        assert reply.head.get("Vary") is None
        assert server.requests[0].head.get("Accept-Encoding") == "gzip"
