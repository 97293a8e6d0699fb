"""Content types with a meaning, and binary tensors without Inference-Header-Content-Length."""

from __future__ import annotations

import asyncio
import base64
import json
import random

import pytest

from tests.support.gateway import UPSTREAM, gateway_client, served
from tests.support.http_messages import chunked, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    binary_response_header,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
    metadata,
)
from tests.support.servers.model_scripts import echo_tensors, model_script
from tests.support.servers.scripted_server import ScriptedServer, always_respond

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


MIXED = json_request()[:-1] + (
    b',"outputs":[{"name":"OUT0"},{"name":"OUT1","parameters":{"binary_data":true}}]}'
)
CLIENTS = {
    "JSON": infer_json(),
    "binary": infer_binary(binary_header(4, binary_output=True), bytes(4)),
    "mixed": infer_json(MIXED),
    "raw": infer_raw(bytes(4)),
    "V1": request("POST", "/v1/models/m:predict", b'{"instances":[1]}'),
}
HEADER_CAP = "256KiB"


def _framed(body: bytes, form: str) -> bytes:
    if form == "sized":
        return http_response(body)
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
    return message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}, chunked(*pieces))


def _server(body: bytes, form: str = "sized") -> ScriptedServer:
    """Return a server that responds to infer requests with this body, without a header length."""
    outputs = [{"name": f"OUT{i}", "datatype": "FP32", "shape": [-1]} for i in range(2)]
    document = json.dumps({**json.loads(metadata(-1)), "outputs": outputs}).encode()
    return ScriptedServer(model_script(_framed(body, form), http_response(document)))


# Small, beyond a chunk, and beyond limits.max_inference_header_bytes.
SIZES = [(8, "sized", "triton"), (100_000, "chunked", "kserve"), (400_000, "chunked", "triton")]


@pytest.mark.parametrize("client_form", CLIENTS)
@pytest.mark.parametrize(("size", "form", "dialect"), SIZES)
async def test_tensors_without_a_header_length_are_a_502(
    client_form: str, size: int, form: str, dialect: str
) -> None:
    body = binary_response_header(size, 4) + bytes(size + 4)
    settings = {"upstream": {"dialect": dialect}, "max_inference_header_bytes": HEADER_CAP}
    async with _server(body, form) as server, gateway_client(server.url, **settings) as client:
        reply = await client.ask(CLIENTS[client_form])
        assert reply.status == 502
        assert reply.error.startswith(UPSTREAM)
        assert HEADER_LENGTH in reply.error


@pytest.mark.parametrize("data", CLIENTS.values(), ids=CLIENTS)
@pytest.mark.parametrize("form", ["sized", "chunked"])
async def test_tensors_after_json_that_was_sent_already_end_the_connection(
    data: bytes, form: str
) -> None:
    """JSON above limits.max_inference_header_bytes is not buffered: its start was sent already."""
    fields = json.loads(binary_response_header(8, 4))
    entry = {"name": "OUT0", "shape": [200_000], "datatype": "FP32", "data": [0] * 200_000}
    fields["outputs"][0] = entry
    body = json.dumps(fields).encode() + bytes(4)
    async with (
        _server(body, form) as server,
        gateway_client(server.url, max_inference_header_bytes=HEADER_CAP) as client,
    ):
        await client.send(data)
        try:
            reply = await client.read_response()
        except (ConnectionResetError, asyncio.IncompleteReadError):
            return
        assert reply.status == 502
        assert reply.error.startswith(UPSTREAM)


@pytest.mark.parametrize(
    ("form", "space"),
    [("sized", b""), ("chunked", b"\r\n \t"), ("sized", b" " * 300_000)],
    ids=["no space", "chunked", "much space"],
)
@pytest.mark.parametrize("client_form", CLIENTS)
async def test_empty_tensors_need_no_header_length(
    client_form: str, form: str, space: bytes
) -> None:
    """Triton sends none if every output is empty."""
    body = binary_response_header(0, 0) + space
    async with (
        _server(body, form) as server,
        gateway_client(server.url, max_inference_header_bytes=HEADER_CAP) as client,
    ):
        reply = await client.ask(CLIENTS[client_form])
        if client_form == "V1" and len(space) > 1000:
            assert reply.status == 502  # more than is buffered of a response
            return
        assert reply.status == 200
        assert reply.head.get(HEADER_LENGTH) is None
        assert reply.json
