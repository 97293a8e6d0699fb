"""Header lengths in the Content-Type, over real connections."""

import pytest

from tests.support.http_messages import chunked, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    binary_response_header,
    json_request,
)
from tests.support.servers.scripted_server import always_respond
from tests.support.servers.served import served

SAGEMAKER = "application/vnd.sagemaker-triton.binary+json"
HEADER = binary_header(12, binary_output=True)
BODY = HEADER + FLOATS.tobytes()
TYPE = {"Content-Type": f"{SAGEMAKER};json-header-size={len(HEADER)}"}
ANSWER = binary_response(FLOATS.tobytes())


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


async def test_invalid_cloud_type_keeps_the_connection_open() -> None:
    async with served(always_respond(ANSWER)) as (server, _, client):
        for value in (f"{SAGEMAKER};json-header-size=x", f"x/{SAGEMAKER}"):
            reply = await client.call("POST", INFER, BODY, {"Content-Type": value})
            assert reply.status == 400
            assert "Content-Type" in reply.error
        # Two types are refused, even if the whole body is JSON.
        for body in (BODY, json_request()):
            twice = request("POST", INFER, body, TYPE)
            twice = twice.replace(b"\r\n", b"\r\nContent-Type: a/b\r\n", 1)
            assert (await client.ask(twice)).status == 400
        assert (await client.call("POST", INFER, BODY, TYPE)).status == 200
        assert len(server.requests) == 1
