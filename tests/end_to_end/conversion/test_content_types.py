"""Binary tensors without Inference-Header-Content-Length."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.gateway import UPSTREAM, gateway_client
from tests.support.http_messages import chunked, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    binary_header,
    binary_response_header,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
    metadata,
)
from tests.support.servers.model_scripts import model_script
from tests.support.servers.scripted_server import ScriptedServer

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
