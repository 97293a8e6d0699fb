"""BYTES as base64, tensor by tensor, over real connections."""

import base64
import json
import random
from typing import Any

import pytest

from tests.support.gateway import gateway_client
from tests.support.http_messages import chunked, http_response, message, request
from tests.support.inference_messages import HEADER_LENGTH, INFER
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, ScriptedServer

BASE64 = {"content_type": "base64"}
PICTURE = b"\xff\xd8\xff\xe0" + random.Random(0).randbytes(500_000) + b"\xff\xd9"


def pack(*elements: bytes) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in elements)


async def echoing(connection: Connection) -> None:
    """Respond with the received BYTES, or with bytes that are not UTF-8."""
    while True:
        received = await connection.request()
        size = int(received.head.get(HEADER_LENGTH) or 0)
        (sent, *_) = json.loads(received.body[:size])["inputs"]
        tensor, shape = received.body[size:], sent["shape"]
        if sent["datatype"] != "BYTES":
            tensor, shape = pack(b"\xff\xfe"), [1]
        output = {
            "name": "OUT",
            "datatype": "BYTES",
            "shape": shape,
            "parameters": {"binary_data_size": len(tensor)},
        }
        header = json.dumps({"model_name": "m", "outputs": [output]}).encode()
        await connection.send(http_response(header + tensor, {HEADER_LENGTH: str(len(header))}))


def body(data: list[Any], datatype: str = "BYTES", **parameters: object) -> bytes:
    """Return a request with one input; ``parameters`` are those of its output."""
    entry: dict[str, Any] = {"name": "IN", "shape": [len(data)], "datatype": datatype}
    if datatype == "BYTES":
        entry["parameters"] = BASE64
    fields: dict[str, Any] = {"inputs": [{**entry, "data": data}]}
    if parameters:
        fields["outputs"] = [{"name": "OUT", "parameters": parameters}]
    return json.dumps(fields).encode()


async def output_of(client: RawClient, data: bytes) -> dict[str, Any]:
    reply = await client.ask(data)
    assert reply.status == 200, reply.body
    assert reply.head.get("Content-Type") == "application/json"
    (output,) = reply.json["outputs"]
    assert isinstance(output, dict)
    return output


@pytest.mark.parametrize("elements", [[b"\xff\xd8", b""], [b"a", PICTURE, b""], [PICTURE] * 3])
async def test_base64_round_trip(elements: list[bytes]) -> None:
    texts = [base64.b64encode(each).decode() for each in elements]
    asked = body(texts, **BASE64)
    unsized = message(
        f"POST {INFER} HTTP/1.1",
        {"Host": "x", "Transfer-Encoding": "chunked"},
        chunked(*(asked[i : i + 70_001] for i in range(0, len(asked), 70_001))),
    )
    async with ScriptedServer(echoing) as server, gateway_client(server.url) as client:
        for data in (request("POST", INFER, asked), unsized):
            output = await output_of(client, data)
            assert output["data"] == texts
            assert output["parameters"] == BASE64
            received = server.requests[-1]
            size = int(received.head.get(HEADER_LENGTH) or 0)
            assert received.body[size:] == pack(*elements)
            assert b"content_type" not in received.body[:size]


async def test_base64_output_of_a_request_with_numbers(fast_path_requests: list[str]) -> None:
    async with ScriptedServer(echoing) as server, gateway_client(server.url) as client:
        for _ in range(3):
            output = await output_of(
                client, request("POST", INFER, body([1.5, 2], "FP32", **BASE64))
            )
            assert output["data"] == ["//4="]
            assert output["parameters"] == BASE64
        assert fast_path_requests == [INFER] * 3
        # Without the parameter, the response follows the route's policy.
        reply = await client.call("POST", INFER, body([1.5, 2], "FP32"))
        assert reply.status == 406
        assert "content_type base64" in reply.error
        assert fast_path_requests == [INFER] * 4
