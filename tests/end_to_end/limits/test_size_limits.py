"""Size limits of a call: a 413 that names the limit, as early as possible."""

import json

import pytest

from tests.support.gateway import UPSTREAM, gateway_before
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_response,
    binary_response_header,
    infer_binary,
    infer_json,
    json_request,
    metadata,
)
from tests.support.servers.scripted_server import Connection, always_respond
from tests.support.servers.served import served

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


@pytest.mark.parametrize("size", [KIB, 20 * KIB])
async def test_header_bytes_of_a_response_are_capped(size: int) -> None:
    header = binary_response_header(8)[:-1] + b',"x":"%s"}' % (b"x" * size)
    data = http_response(header + bytes(8), {HEADER_LENGTH: str(len(header))})
    async with served(always_respond(data), max_inference_header_bytes=KIB) as (_, _, client):
        reply = await client.ask(infer_json())
        assert reply.status == 502
        assert "limits.max_inference_header_bytes" in reply.error
        assert UPSTREAM in reply.error


async def _knows_a_model(connection: Connection) -> None:
    while True:
        received = await connection.request()
        if received.head.target == INFER:
            await connection.send(binary_response(bytes(8)))
        else:
            await connection.send(http_response(metadata(-1)))


def _raw_chunks(size: int) -> bytes:
    head = {"Host": "x", "Transfer-Encoding": "chunked", HEADER_LENGTH: "0"}
    return message(f"POST {INFER} HTTP/1.1", head, chunk(bytes(size)) + chunk(b""))


async def test_spool_bytes_cap_a_raw_binary_request_without_length() -> None:
    async with served(_knows_a_model, max_buffered_body_bytes=KIB) as (server, _, client):
        assert (await client.ask(_raw_chunks(KIB))).status == 200
        reply = await client.ask(_raw_chunks(KIB + 4))
        assert reply.status == 413
        assert "limits.max_buffered_body_bytes" in reply.error
        assert "Content-Length" in reply.error
        assert len([r for r in server.requests if r.head.target == INFER]) == 1


MIXED_OUTPUTS = json_request()[:-1] + (
    b',"outputs":[{"name":"OUT0","parameters":{"binary_data":true}},{"name":"OUT1"}]}'
)


@pytest.mark.parametrize("sizes", [(4 * KIB, 8), (8, 4 * KIB)], ids=["binary", "json"])
async def test_spool_bytes_cap_a_mixed_response(sizes: tuple[int, int]) -> None:
    data = binary_response(*map(bytes, sizes))
    async with served(always_respond(data), max_buffered_body_bytes=KIB) as (_, _, client):
        reply = await client.ask(infer_json(MIXED_OUTPUTS))
        assert reply.status == 502
        assert "limits.max_buffered_body_bytes" in reply.error
        assert UPSTREAM in reply.error


async def test_max_tensors_are_refused_in_every_form() -> None:
    async with served(max_tensors=2) as (server, _, client):
        for count, status in ((2, 200), (3, 400)):
            data = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}] * count
            padded = json.dumps({"inputs": data, "id": "a" * 200 * KIB}).encode()
            size = {"parameters": {"binary_data_size": 4}}
            binary = [{"name": "x", "datatype": "FP32", "shape": [1], **size}] * count
            header = json.dumps({"inputs": binary}).encode()
            for asked in (
                infer_json(json.dumps({"inputs": data}).encode()),
                infer_json(padded),
                infer_binary(header, bytes(4 * count)),
            ):
                reply = await client.ask(asked)
                assert reply.status == status
                if status == 400:
                    assert reply.error == "the request has more than 2 inputs (limits.max_tensors)"
        assert len(server.requests) == 3
