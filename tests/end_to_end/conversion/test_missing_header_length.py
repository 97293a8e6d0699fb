"""Servers that send binary tensors without Inference-Header-Content-Length."""

import asyncio
import json

import pytest

from tests.support.gateway import UPSTREAM, gateway_client
from tests.support.http_messages import chunked, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response_header,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
    metadata,
)
from tests.support.servers.scripted_server import Connection, ScriptedServer

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
SIZES = {"small": 8, "beyond a chunk": 100_000, "beyond limits.max_inference_header_bytes": 400_000}
HEADER_CAP = "256KiB"


def _framed(body: bytes, form: str) -> bytes:
    if form == "sized":
        return http_response(body)
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
    return message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}, chunked(*pieces))


def _server(body: bytes, form: str = "sized") -> ScriptedServer:
    """Return a server that responds to infer requests with this body, without a header length."""
    outputs = [{"name": f"OUT{i}", "datatype": "FP32", "shape": [-1]} for i in range(2)]
    document = {**json.loads(metadata(-1)), "outputs": outputs}

    async def script(connection: Connection) -> None:
        while True:
            target = (await connection.request()).head.target
            if target == INFER:
                await connection.send(_framed(body, form))
            elif target == "/v2/models/m":
                await connection.send(http_response(json.dumps(document).encode()))
            else:
                await connection.send(http_response(b'{"error":"no"}', status="404 Not Found"))

    return ScriptedServer(script)


WITHOUT_A_LENGTH = [
    *((client, "small", "sized", "triton") for client in CLIENTS),
    *((client, "beyond a chunk", "chunked", "kserve") for client in CLIENTS),
    *(("JSON", size, form, "triton") for size in list(SIZES)[1:] for form in ("sized", "chunked")),
    *(("binary", size, "chunked", "openvino") for size in SIZES),
]


@pytest.mark.parametrize(("client_form", "size", "form", "dialect"), WITHOUT_A_LENGTH)
async def test_tensors_without_a_header_length_are_a_502(
    client_form: str, size: str, form: str, dialect: str
) -> None:
    data = CLIENTS[client_form]
    body = binary_response_header(SIZES[size], 4) + bytes(SIZES[size] + 4)
    async with (
        _server(body, form) as server,
        gateway_client(
            server.url, upstream={"dialect": dialect}, max_inference_header_bytes=HEADER_CAP
        ) as client,
    ):
        reply = await client.ask(data)
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


SPACES = {"none": b"", "few": b"\r\n \t", "many": b" " * 300_000}
EMPTY = [
    *((client, "sized", "none") for client in CLIENTS),
    *((client, "chunked", "few") for client in ("JSON", "binary", "V1")),
    *((client, form, "many") for client in CLIENTS for form in ("sized", "chunked")),
]


@pytest.mark.parametrize(("client_form", "form", "spaces"), EMPTY)
async def test_empty_tensors_need_no_header_length(
    client_form: str, form: str, spaces: str
) -> None:
    """Triton sends none if every output is empty."""
    data, space = CLIENTS[client_form], SPACES[spaces]
    body = binary_response_header(0, 0) + space
    async with (
        _server(body, form) as server,
        gateway_client(server.url, max_inference_header_bytes=HEADER_CAP) as client,
    ):
        reply = await client.ask(data)
        if data == CLIENTS["V1"] and len(space) > 1000:
            assert reply.status == 502  # more than is buffered of a response
            return
        assert reply.status == 200
        assert reply.head.get(HEADER_LENGTH) is None
        assert reply.json
