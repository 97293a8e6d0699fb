"""Content types with a meaning: BYTES as base64 by tensor, and header lengths of SageMaker."""

import base64
import json
import random

import pytest

from tests.support.http_messages import chunked, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    binary_response_header,
)
from tests.support.servers.model_scripts import echo_tensors
from tests.support.servers.scripted_server import always_respond
from tests.support.servers.served import served

BASE64 = {"content_type": "base64"}
PICTURE = b"\xff\xd8\xff\xe0" + random.Random(0).randbytes(500_000) + b"\xff\xd9"


@pytest.mark.parametrize("elements", [[b"\xff\xd8", b""], [b"a", PICTURE, b""]])
async def test_base64_round_trip(elements: list[bytes]) -> None:
    texts = [base64.b64encode(each).decode() for each in elements]
    tensor = {"name": "IN", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
    fields = {
        "inputs": [{**tensor, "parameters": BASE64}],
        "outputs": [{"name": "OUT", "parameters": BASE64}],
    }
    body = json.dumps(fields).encode()
    head = {"Host": "x", "Transfer-Encoding": "chunked"}
    pieces = chunked(*(body[i : i + 70_001] for i in range(0, len(body), 70_001)))
    unsized = message(f"POST {INFER} HTTP/1.1", head, pieces)
    async with served(echo_tensors) as (server, _, client):
        for data in (request("POST", INFER, body), unsized):
            reply = await client.ask(data)
            assert reply.status == 200, reply.body
            (output,) = reply.json["outputs"]
            assert (output["data"], output["parameters"]) == (texts, BASE64)
            received = server.requests[-1]
            size = int(received.head.get(HEADER_LENGTH) or 0)
            packed = b"".join(len(each).to_bytes(4, "little") + each for each in elements)
            assert received.body[size:] == packed
            assert b"content_type" not in received.body[:size]


SAGEMAKER = "application/vnd.sagemaker-triton.binary+json"


@pytest.mark.parametrize("tensor", [FLOATS.tobytes(), bytes(400_000)], ids=["small", "large"])
async def test_header_length_in_the_content_type_works_sized_and_chunked(tensor: bytes) -> None:
    header = binary_header(len(tensor), binary_output=True)
    types = {"Content-Type": f'{SAGEMAKER}; json-header-size="{len(header)}"'}
    response = binary_response(tensor)
    async with served(always_respond(response)) as (server, _, client):
        sized = request("POST", INFER, header + tensor, types)
        unsized = {"Host": "x", **types, "Transfer-Encoding": "chunked"}
        pieces = chunked(header[:7], header[7:] + tensor[:5], tensor[5:])
        for data in (sized, message(f"POST {INFER} HTTP/1.1", unsized, pieces)):
            reply = await client.ask(data)
            size = len(binary_response_header(len(tensor)))
            assert reply.head.get("Content-Type") == f"{SAGEMAKER};json-header-size={size}"
            assert reply.head.get(HEADER_LENGTH) is None
            assert reply.body[size:] == tensor
            received = server.requests[-1]
            assert received.head.get("Content-Type") == "application/octet-stream"
            assert received.head.get(HEADER_LENGTH) == str(len(header))
            assert received.body == header + tensor
