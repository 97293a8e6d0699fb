"""Server and client get the same, however a request is cut into pieces."""

import asyncio
import json

import pytest

from tests.support.gateway import gateway_client
from tests.support.http_messages import chunk, chunked, http_response, message
from tests.support.inference_messages import HEADER_LENGTH, INFER, binary_response, metadata
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, ScriptedServer

JSON = (
    b'{"id":"\xc3\xa4","inputs":[{"name":"A","shape":[2,2],"datatype":"FP32",'
    b'"data":[[1.5,-2e3],[0.1,3]]},{"datatype":"BYTES","data":["\\u00e9\\"]",""],'
    b'"shape":[2],"name":"B"}]}'
)
TENSORS = bytes(range(12))
BINARY = json.dumps(
    {
        "inputs": [
            {"name": "A", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}},
            {"name": "B", "shape": [8], "datatype": "INT8", "parameters": {"binary_data_size": 8}},
        ]
    }
).encode()
MIXED = json.dumps(
    {
        "inputs": [
            {"name": "A", "shape": [1], "datatype": "INT32", "parameters": {"binary_data_size": 4}},
            {"name": "B", "shape": [2], "datatype": "INT64", "data": [1, -1]},
            {"name": "C", "shape": [8], "datatype": "INT8", "parameters": {"binary_data_size": 8}},
        ],
        "outputs": [{"name": "OUT0"}, {"name": "OUT1", "parameters": {"binary_data": True}}],
    }
).encode()

# The length of the JSON part, and the body.
CASES = {
    "json": (None, JSON),
    "binary": (len(BINARY), BINARY + TENSORS),
    "mixed": (len(MIXED), MIXED + TENSORS),
    "raw": (0, TENSORS),
    "wrong json": (None, JSON.replace(b"0.1", b"0.x")),
    "wrong binary": (len(BINARY), BINARY + TENSORS[1:]),
}


def _sized(length: int | None, body: bytes) -> bytes:
    headers = {"Host": "x", "Content-Length": str(len(body))}
    if length is not None:
        headers[HEADER_LENGTH] = str(length)
    return message(f"POST {INFER} HTTP/1.1", headers, body)


def _unsized(length: int | None, parts: list[bytes]) -> bytes:
    headers = {"Host": "x", "Transfer-Encoding": "chunked"}
    if length is not None:
        headers[HEADER_LENGTH] = str(length)
    return message(f"POST {INFER} HTTP/1.1", headers, chunked(*parts))


async def _script(connection: Connection) -> None:
    while True:
        received = await connection.request()
        if received.head.target == INFER:
            await connection.send(binary_response(bytes(8), bytes(4)))
        else:
            await connection.send(http_response(metadata(-1)))


async def _wait_for_arrival() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


Outcome = tuple[int, bytes, list[bytes]]


async def _outcome(client: RawClient, server: ScriptedServer, *parts: bytes) -> Outcome:
    """Send a request in parts; return what the client got and what the server got."""
    seen = len(server.requests)
    for part in parts:
        await client.send(part)
        await _wait_for_arrival()
    reply = await client.read_response()
    infers = [r.body for r in server.requests[seen:] if r.head.target == INFER]
    return reply.status, reply.body, infers


@pytest.mark.parametrize(("length", "body"), CASES.values(), ids=CASES)
async def test_request_may_be_cut_at_every_byte(length: int | None, body: bytes) -> None:
    data = _sized(length, body)
    async with ScriptedServer(_script) as server, gateway_client(server.url) as client:
        whole = await _outcome(client, server, data)
        for at in range(1, len(data)):
            assert await _outcome(client, server, data[:at], data[at:]) == whole
        pieces = [data[at : at + 1] for at in range(len(data))]
        assert await _outcome(client, server, *pieces) == whole


@pytest.mark.parametrize("case", ["json", "mixed", "raw"])
async def test_request_may_be_chunked_in_any_way(case: str) -> None:
    length, body = CASES[case]
    async with ScriptedServer(_script) as server, gateway_client(server.url) as client:
        whole = await _outcome(client, server, _sized(length, body))
        for at in range(len(body) + 1):
            parts = [part for part in (body[:at], body[at:]) if part]
            assert await _outcome(client, server, _unsized(length, parts)) == whole
        pieces = [body[at : at + 1] for at in range(len(body))]
        assert await _outcome(client, server, _unsized(length, pieces)) == whole
        head, *rest = _unsized(length, []).partition(b"\r\n\r\n")
        assert rest == [b"\r\n\r\n", b"0\r\n\r\n"]
        head += b"\r\n\r\n"
        chunks = [*map(chunk, pieces), chunk(b"")]
        assert await _outcome(client, server, head, *chunks) == whole


async def test_response_may_be_cut_at_every_byte() -> None:
    data = binary_response(bytes(range(8)), bytes(range(4)))
    at = 0

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(data[:at])
            await _wait_for_arrival()
            await connection.send(data[at:])

    length, body = CASES["mixed"]
    async with ScriptedServer(script) as server, gateway_client(server.url) as client:
        for request in (_sized(None, JSON), _sized(length, body)):
            whole = await client.ask(request)
            assert whole.status == 200
            for cut in range(len(data)):
                at = cut
                assert (await client.ask(request)).body == whole.body
