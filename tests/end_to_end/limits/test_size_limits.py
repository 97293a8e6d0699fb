"""Size limits of a call: a 413 that names the limit, as early as possible."""

import pytest

from tests.support.gateway import UPSTREAM, gateway_before
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_response_header,
    infer_binary,
    infer_json,
    json_request,
)
from tests.support.servers.scripted_server import always_respond
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
