"""Headers that say how one side sends say nothing of what the other side gets."""

from __future__ import annotations

import json

import grpc
import pytest

from tests.support.gateway import gateway_client
from tests.support.grpc.client import grpc_client_of
from tests.support.grpc.infer_messages import infer_request
from tests.support.grpc.proto_file import message_class
from tests.support.http_messages import http_response
from tests.support.servers.grpc_server import GrpcServer
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

_METADATA = bytes(message_class("ModelMetadataRequest")(name="m").SerializeToString())


@pytest.mark.parametrize("name", ["accept-encoding", "content-encoding"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelMetadata"])
async def test_codings_of_a_call_do_not_reach_a_server_over_http(name: str, method: str) -> None:
    names: list[str] = []

    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request()
            names.extend(each.lower() for each, _ in request.head.headers)
            await connection.send(http_response(json.dumps({"name": "m", "outputs": []}).encode()))

    async with ScriptedServer(script) as server, grpc_client_of(server.url) as client:
        message = infer_request() if method == "ModelInfer" else _METADATA
        response = await client.call(method, message, metadata=[(name, "gzip")])
    assert response.code is grpc.StatusCode.OK, response.text
    assert "user-agent" in names
    assert name not in names


async def test_fields_of_grpc_in_a_request_over_http_do_not_reach_the_server(
    server: GrpcServer,
) -> None:
    body = b'{"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}'
    fields = "grpc-timeout: soon\r\ngrpc-encoding: none\r\ngrpc-accept-encoding: gzip\r\nX-Own: 1"
    async with gateway_client(server.url) as client:
        for first in ("POST /v2/models/m/infer", "GET /v2/models/m"):
            sent = body if first.startswith("POST") else b""
            head = f"{first} HTTP/1.1\r\nHost: x\r\n{fields}\r\nContent-Length: {len(sent)}"
            await client.send(f"{head}\r\n\r\n".encode() + sent)
            assert (await client.read_response()).status == 200
    for metadata in server.metadata:
        assert dict(metadata)["x-own"] == "1"


async def test_invalid_header_length_is_the_fault_of_the_server() -> None:
    response = (
        b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: abc\r\nContent-Length: 2\r\n\r\n{}"
    )
    async with (
        ScriptedServer(always_respond(response)) as server,
        grpc_client_of(server.url) as client,
    ):
        failed = await client.call("ModelInfer", infer_request())
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert "Inference-Header-Content-Length" in failed.text
