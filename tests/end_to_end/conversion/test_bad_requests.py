"""Invalid infer requests: a 400 that names the invalid element, and no server sees them."""

import asyncio

import pytest

from tests.support.gateway import gateway_client
from tests.support.http_messages import chunked, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    infer_binary,
    infer_json,
    json_request,
)
from tests.support.servers.scripted_server import ScriptedServer

TWO = binary_header(8)


def _chunked(length: int | None, *parts: bytes) -> bytes:
    headers = {"Host": "x", "Transfer-Encoding": "chunked"}
    if length is not None:
        headers[HEADER_LENGTH] = str(length)
    return message(f"POST {INFER} HTTP/1.1", headers, chunked(*parts))


BAD = {
    "no JSON": (infer_json(b"\x00\x01\x02"), "not valid JSON"),
    "does not fit": (infer_json(json_request().replace(b"-2.0", b'"x"')), "element 1"),
    "length beyond the body": (
        request("POST", INFER, TWO + bytes(8), {HEADER_LENGTH: str(len(TWO) + 9)}),
        f"{len(TWO) + 9}",
    ),
    "tensors too short": (infer_binary(TWO, bytes(7)), "add up to 8"),
    "tensors too long": (infer_binary(TWO, bytes(9)), "9 bytes follow"),
    "chunks shorter than the length": (_chunked(len(TWO) + 1, TWO), "is 1 bytes shorter than"),
    "tensors in chunks too short": (
        _chunked(len(TWO), TWO, bytes(7)),
        "is 1 bytes shorter than",
    ),
    "tensors too long, in one chunk more": (
        _chunked(len(TWO), TWO, bytes(8), bytes(1)),
        "longer than its inference header",
    ),
    "tail behind JSON alone": (
        _chunked(len(json_request()), json_request(), bytes(1)),
        "longer than its inference header",
    ),
}


@pytest.mark.parametrize(("data", "culprit"), BAD.values(), ids=BAD)
async def test_invalid_request_is_a_400_that_names_the_element(data: bytes, culprit: str) -> None:
    async with ScriptedServer() as server, gateway_client(server.url) as client:
        for _ in range(2):
            reply = await client.ask(data)
            assert reply.status == 400
            assert culprit in reply.error
        # The connection can still be used.
        assert (await client.ask(infer_json())).status == 200
        assert len(server.requests) == 1


async def test_request_shorter_than_its_length_reaches_no_server() -> None:
    for data in (infer_json(), infer_binary(TWO, bytes(8)), request("POST", "/v2/x", bytes(99))):
        async with ScriptedServer() as server:
            async with gateway_client(server.url) as client:
                await client.send(data[:-1])
                await asyncio.sleep(0.02)
                await client.close()
            assert server.requests == []
