"""Responses that the gateway buffers between HTTP and gRPC count in the memory budget."""

from __future__ import annotations

import asyncio
import json

import grpc

from gateway.protocol.grpc.framing import frame
from tests.support.gateway import running_gateway, until
from tests.support.grpc.client import grpc_client, grpc_client_of
from tests.support.grpc.infer_messages import infer_request
from tests.support.grpc.proto_file import message_class
from tests.support.servers.http2_server import Http2Peer, http2_script
from tests.support.servers.scripted_server import Connection, ScriptedServer

_SIZE = 1_000_000


async def test_response_over_http_to_a_call() -> None:
    output = {
        "name": "OUT",
        "datatype": "UINT8",
        "shape": [_SIZE],
        "parameters": {"binary_data_size": _SIZE},
    }
    head = json.dumps({"model_name": "m", "outputs": [output]}).encode()
    rest = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
            b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n%b%b"
            % (len(head), len(head) + _SIZE, head, bytes(_SIZE - 1))
        )
        await rest.wait()
        await connection.send(b"\0")

    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url) as gateway,
        grpc_client(gateway.url) as client,
    ):
        budget = gateway.gateway.active_config.router.memory_budget
        call = asyncio.create_task(client.call("ModelInfer", infer_request()))
        await until(lambda: budget.buffers.reserved > _SIZE - 100)
        rest.set()
        assert (await call).code is grpc.StatusCode.OK
        await gateway.until_idle()
        assert budget.buffers.reserved == 0


async def test_message_to_a_client_over_http() -> None:
    async def play(peer: Http2Peer) -> None:
        stream = await peer.request()
        message = frame(_SIZE) + bytes(_SIZE - 1)
        await peer.respond(stream, message, [("content-type", "application/grpc")], end=False)
        await peer.serve_to_end()

    body = b'{"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}'
    async with (
        ScriptedServer(http2_script(play)) as server,
        running_gateway(server.url.replace("http://", "grpc://")) as gateway,
    ):
        budget = gateway.gateway.active_config.router.memory_budget
        async with gateway.client() as client:
            head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
            await client.send(f"{head}\r\n\r\n".encode() + body)
            await until(lambda: budget.buffers.reserved >= _SIZE)
        await gateway.until_idle()
        assert budget.buffers.reserved == 0


async def test_response_over_the_budget_is_refused() -> None:
    document = json.dumps({"name": "m", "platform": "x" * 3_000_000}).encode()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(document), document)
        )

    request = bytes(message_class("ModelMetadataRequest")(name="m").SerializeToString())
    async with (
        ScriptedServer(script) as server,
        grpc_client_of(server.url, max_buffered_bytes="1MiB") as client,
    ):
        response = await client.call("ModelMetadata", request)
    assert response.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_buffered_bytes" in response.text
