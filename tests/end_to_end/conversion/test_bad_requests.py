"""Invalid infer requests: a 400 that names the invalid element, and no server sees them."""

import asyncio
import json

import pytest

from tests.support.gateway import gateway_client
from tests.support.http_messages import chunked, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
)
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.support.servers.served import served

TWO = binary_header(8)
MIXED = json.dumps(
    {
        "inputs": [
            {"name": "A", "shape": [1], "datatype": "FP32", "data": [1]},
            {"name": "B", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
        ]
    }
).encode()


def _with_length(length: str, body: bytes = TWO + bytes(8)) -> bytes:
    return request("POST", INFER, body, {HEADER_LENGTH: length})


def _inputs(*entries: object) -> bytes:
    return infer_json(json.dumps({"inputs": entries}).encode())


def _tensor(**changed: object) -> bytes:
    entry = {"name": "IN", "shape": [2], "datatype": "FP32", "data": [1, 2], **changed}
    return _inputs({key: value for key, value in entry.items() if value is not None})


BAD = {
    "no JSON": (infer_json(b"\x00\x01\x02"), "not valid JSON"),
    "does not fit": (_tensor(datatype="UINT8", data=[1, 300]), "element 1 (300)"),
    "data nested too deep": (
        infer_json(
            b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":'
            + b"[" * 300
            + b"1"
            + b"]" * 300
            + b"}]}"
        ),
        "deeper than 64",
    ),
    "length a word": (_with_length("many"), "'many'"),
    "length beyond the body": (_with_length(str(len(TWO) + 9)), f"{len(TWO) + 9}"),
    "tensors too short": (infer_binary(TWO, bytes(7)), "add up to 8"),
    "tensors too long": (infer_binary(TWO, bytes(9)), "9 bytes follow"),
    "mixed too short": (infer_binary(MIXED, bytes(7)), "add up to 8"),
}


@pytest.mark.parametrize(("data", "culprit"), BAD.values(), ids=BAD)
async def test_invalid_request_is_a_400_that_names_the_element(data: bytes, culprit: str) -> None:
    good = infer_json(b'{"inputs":[]}')
    async with ScriptedServer(always_respond(http_response(b'{"outputs":[]}'))) as server:
        async with gateway_client(server.url) as client:
            for _ in range(2):
                reply = await client.ask(data)
                assert reply.status == 400
                assert culprit in reply.error
            # The connection can still be used.
            assert (await client.ask(good)).status == 200
        assert len(server.requests) == 1


async def test_two_header_lengths_are_a_400() -> None:
    size = str(len(TWO))
    head = message(
        f"POST {INFER} HTTP/1.1", {"Host": "x", HEADER_LENGTH: size, HEADER_LENGTH.lower(): size}
    )
    async with ScriptedServer() as server, gateway_client(server.url) as client:
        reply = await client.ask(head)
        assert reply.status == 400
        assert HEADER_LENGTH in reply.error
        assert server.requests == []


def _chunked(length: int | None, *parts: bytes) -> bytes:
    headers = {"Host": "x", "Transfer-Encoding": "chunked"}
    if length is not None:
        headers[HEADER_LENGTH] = str(length)
    return message(f"POST {INFER} HTTP/1.1", headers, chunked(*parts))


BAD_CHUNKED = {
    "length beyond the body": (_chunked(len(TWO) + 1, TWO), "is 1 bytes shorter than"),
    "tensors too short": (_chunked(len(TWO), TWO, bytes(7)), "is 1 bytes shorter than"),
    "tensors too long, in one chunk more": (
        _chunked(len(TWO), TWO, bytes(8), bytes(1)),
        "longer than its inference header",
    ),
    "a tail behind JSON alone": (
        _chunked(len(json_request()), json_request(), bytes(1)),
        "longer than its inference header",
    ),
}


@pytest.mark.parametrize(("data", "culprit"), BAD_CHUNKED.values(), ids=BAD_CHUNKED)
async def test_invalid_chunked_request_is_a_400(data: bytes, culprit: str) -> None:
    async with ScriptedServer(always_respond(http_response(b'{"outputs":[]}'))) as server:
        async with gateway_client(server.url) as client:
            for _ in range(2):
                reply = await client.ask(data)
                assert reply.status == 400
                assert culprit in reply.error
        assert server.requests == []


async def test_request_shorter_than_its_length_reaches_no_server() -> None:
    for data in (infer_json(), infer_binary(TWO, bytes(8)), request("POST", "/v2/x", bytes(99))):
        async with ScriptedServer() as server:
            async with gateway_client(server.url) as client:
                await client.send(data[:-1])
                await asyncio.sleep(0.02)
                await client.close()
            assert server.requests == []


async def test_metadata_error_of_the_server_passes_to_the_client() -> None:
    refusal = http_response(
        b'{"error":"unknown model m"}', {"Content-Type": "text/x"}, "404 Not Found"
    )
    async with served(always_respond(refusal)) as (_, _, client):
        for _ in range(2):
            reply = await client.ask(infer_raw(bytes(8)))
            assert reply.head.first == "HTTP/1.1 404 Not Found"
            assert reply.head.get("Content-Type") == "text/x"
            assert reply.body == b'{"error":"unknown model m"}'
