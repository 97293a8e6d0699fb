"""Invalid infer requests: a 400 that names the invalid element, and no server sees them."""

import asyncio
import json

import pytest

from tests.support.gateway import UPSTREAM, gateway_client
from tests.support.http_messages import chunked, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
    metadata,
)
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

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
    "no body": (infer_json(b""), "no body"),
    "no JSON": (infer_json(b"\x00\x01\x02"), "not valid JSON"),
    "JSON with a tail": (infer_json(json_request() + b"x"), "not valid JSON"),
    "no object": (infer_json(b"[1]"), "object"),
    "no inputs": (infer_json(b"{}"), "inputs"),
    "inputs no array": (infer_json(b'{"inputs":{}}'), "inputs"),
    "no name": (_tensor(name=None), "name"),
    "unknown datatype": (_tensor(datatype="FP31"), "FP31"),
    "data of objects": (_tensor(data=[{}]), "element 0 is an object"),
    "too few elements": (_tensor(shape=[3]), "takes 3 elements, data has 2"),
    "text among numbers": (_tensor(data=[1, "2"]), "element 1"),
    "does not fit": (_tensor(datatype="UINT8", data=[1, 300]), "element 1 (300)"),
    "nested too deep": (infer_json(b"[" * 100_000), "JSON"),
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
    "binary size off the shape": (_tensor(data=None, parameters={"binary_data_size": 9}), "is 9"),
    "length a word": (_with_length("many"), "'many'"),
    "length beyond the body": (_with_length(str(len(TWO) + 9)), f"{len(TWO) + 9}"),
    "length into the tensors": (_with_length(str(len(TWO) + 1)), f"{HEADER_LENGTH}: {len(TWO)}"),
    "length into the JSON": (_with_length(str(len(TWO) - 1)), "not valid JSON"),
    "length of all of the body": (_with_length(str(len(TWO) + 8)), f"{HEADER_LENGTH}: {len(TWO)}"),
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
    "no body": (_chunked(None), "JSON"),
    "length beyond the body": (_chunked(len(TWO) + 1, TWO), "is 1 bytes shorter than"),
    "tensors too short": (_chunked(len(TWO), TWO, bytes(7)), "is 1 bytes shorter than"),
    "tensors too long": (_chunked(len(TWO), TWO, bytes(9)), "longer than its inference header"),
    "tensors too long, in one chunk more": (
        _chunked(len(TWO), TWO, bytes(8), bytes(1)),
        "longer than its inference header",
    ),
    "mixed too long": (_chunked(len(MIXED), MIXED, bytes(9)), "longer than its inference header"),
    "a tail behind JSON alone": (
        _chunked(len(json_request()), json_request(), bytes(1)),
        "longer than its inference header",
    ),
    "a tail behind JSON": (_chunked(None, json_request(), bytes(1)), "not valid JSON"),
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


def _metadata_server(document: bytes, config: bytes | None = None) -> ScriptedServer:
    """Return a server with a model of this metadata that accepts every request."""

    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            if received.head.target.endswith("/config"):
                refused = http_response(b'{"error":"no config"}', status="404 Not Found")
                await connection.send(refused if config is None else http_response(config))
            elif received.head.target.endswith("/infer"):
                await connection.send(binary_response(bytes(4)))
            else:
                await connection.send(http_response(document))

    return ScriptedServer(script)


TWO_INPUTS = json.dumps(
    {"inputs": [{"name": n, "datatype": "FP32", "shape": [-1]} for n in "AB"]}
).encode()

BAD_RAW = {
    "two inputs": (TWO_INPUTS, bytes(8), "takes 2 inputs"),
    "two variable dimensions": (metadata(-1, -1), bytes(8), "at most 1 variable"),
    "bytes that do not divide": (metadata(-1, 4), bytes(17), "multiple of 16"),
    "no bytes": (metadata(2, 2), b"", "takes 16 bytes, got 0"),
    "BYTES of another shape": (metadata(2, datatype="BYTES"), b"text", "[2]"),
}


@pytest.mark.parametrize(("document", "body", "culprit"), BAD_RAW.values(), ids=BAD_RAW)
@pytest.mark.parametrize("form", ["sized", "chunked"])
async def test_invalid_raw_binary_request_is_a_400(
    document: bytes, body: bytes, culprit: str, form: str
) -> None:
    data = infer_raw(body) if form == "sized" else _chunked(0, *([body] if body else []))
    async with _metadata_server(document) as server, gateway_client(server.url) as client:
        for _ in range(2):
            reply = await client.ask(data)
            assert reply.status == 400
            assert culprit in reply.error
        assert not [r for r in server.requests if r.head.target.endswith("/infer")]


BAD_METADATA = {
    "no JSON": b"no",
    "no object": b"[]",
    "inputs no array": b'{"inputs":7}',
    "unknown datatype": metadata(-1, datatype="FP31"),
}


@pytest.mark.parametrize("document", BAD_METADATA.values(), ids=BAD_METADATA)
async def test_invalid_metadata_is_a_502(document: bytes) -> None:
    async with _metadata_server(document) as server, gateway_client(server.url) as client:
        for _ in range(2):
            reply = await client.ask(infer_raw(bytes(8)))
            assert reply.status == 502
            assert UPSTREAM in reply.error
            assert server.url not in reply.error


async def test_metadata_error_of_the_server_passes_to_the_client() -> None:
    refusal = http_response(
        b'{"error":"unknown model m"}', {"Content-Type": "text/x"}, "404 Not Found"
    )
    async with (
        ScriptedServer(always_respond(refusal)) as server,
        gateway_client(server.url) as client,
    ):
        for _ in range(2):
            reply = await client.ask(infer_raw(bytes(8)))
            assert reply.head.first == "HTTP/1.1 404 Not Found"
            assert reply.head.get("Content-Type") == "text/x"
            assert reply.body == b'{"error":"unknown model m"}'


@pytest.mark.parametrize("config", [b"no", b'{"max_batch_size":"many"}', b"{}"])
async def test_invalid_config_means_no_batching(config: bytes) -> None:
    async with (
        _metadata_server(metadata(-1), config) as server,
        gateway_client(server.url) as client,
    ):
        assert (await client.ask(infer_raw(bytes(8)))).status == 200
        (sent,) = [r for r in server.requests if r.head.target.endswith("/infer")]
        header = json.loads(sent.body[: int(sent.head.get(HEADER_LENGTH) or 0)])
        assert header["inputs"][0]["shape"] == [2]
