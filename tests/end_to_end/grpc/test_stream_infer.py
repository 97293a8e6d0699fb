"""Streams of gRPC clients are served by servers over HTTP: a request for each message, in order."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.support.gateway import RunningGateway, running_gateway
from tests.support.grpc.client import (
    GrpcClient,
    GrpcResponse,
    grpc_client,
    take_turns,
)
from tests.support.grpc.infer_messages import infer_request
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import Connection, ScriptedServer


class _Identity:
    """A server's script that returns the tensor of each request; ``errors`` are by model."""

    def __init__(self, errors: dict[str, bytes] | None = None) -> None:
        self.targets: list[str] = []
        self.received_bytes = 0
        self.sent_bytes = 0
        """Of all bodies."""
        self._errors = errors or {}

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await connection.request()
            target = request.head.target
            self.targets.append(target)
            model = target.split("/")[3]
            response = self._errors.get(model) or _response(request.head, request.body)
            self.received_bytes += len(request.body)
            self.sent_bytes += len(response.partition(b"\r\n\r\n")[2])
            await connection.send(response)


def _response(head: Any, body: bytes) -> bytes:
    size = int(head.get("Inference-Header-Content-Length"))
    request = json.loads(body[:size])
    (entry,) = request["inputs"]
    header = json.dumps(
        {
            "model_name": "m",
            "model_version": "1",
            **({"id": request["id"]} if "id" in request else {}),
            "outputs": [{**entry, "name": "OUT"}],
        }
    ).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(header)),
    }
    return http_response(header + body[size:], headers)


def numbered(number: int = 0, model: str = "m", version: str = "") -> bytes:
    """Write a request that tells its number."""
    values = np.float32(number).tobytes()
    return infer_request(model, values, version=version, id=f"r{number}")


def read(response: GrpcResponse) -> list[service_pb2.ModelStreamInferResponse]:
    assert response.code is grpc.StatusCode.OK, response.text
    return [service_pb2.ModelStreamInferResponse.FromString(each) for each in response.messages]


def value_of(message: service_pb2.ModelStreamInferResponse) -> float:
    assert not message.error_message
    (raw,) = message.infer_response.raw_output_contents
    return float(np.frombuffer(raw, "<f4")[0])


@asynccontextmanager
async def _clients(
    script: _Identity, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, GrpcClient]]:
    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url, **settings) as gateway,
        grpc_client(gateway.url) as client,
    ):
        yield gateway, client


async def _stream(
    script: _Identity,
    *messages: bytes,
    metadata: Sequence[tuple[str, str | bytes]] = (),
    compression: grpc.Compression | None = None,
    **settings: Any,
) -> GrpcResponse:
    async with _clients(script, **settings) as (_, client):
        return await client.call(
            "ModelStreamInfer", *messages, metadata=metadata, compression=compression
        )


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
async def test_each_message_gets_its_response_in_order(
    compression: grpc.Compression | None,
) -> None:
    script = _Identity()
    found = read(await _stream(script, *map(numbered, range(5)), compression=compression))
    assert [value_of(message) for message in found] == [0, 1, 2, 3, 4]
    assert [message.infer_response.id for message in found] == ["r0", "r1", "r2", "r3", "r4"]
    for message in found:
        assert message.infer_response.parameters["triton_final_response"].bool_param
        assert message.infer_response.outputs[0].name == "OUT"
    assert script.targets == ["/v2/models/m/infer"] * 5


async def test_response_comes_before_the_next_request_is_sent() -> None:
    async with _clients(_Identity()) as (_, client):
        found = await take_turns(client, *map(numbered, range(3)))
    messages = map(service_pb2.ModelStreamInferResponse.FromString, found)
    assert list(map(value_of, messages)) == [0, 1, 2]


BUSY = http_response(b'{"error": "busy, sorry"}', status="503 Busy")


async def test_error_is_a_message_and_the_stream_goes_on() -> None:
    invalid = service_pb2.ModelInferRequest(model_name="m", id="7")
    invalid.inputs.add(name="IN", datatype="FP32", shape=[2])
    invalid.raw_input_contents.append(b"abc")
    script = _Identity({"bad": BUSY})
    messages = numbered(0), numbered(1, "bad"), numbered(2), invalid.SerializeToString()
    first, second, third, fourth = read(await _stream(script, *messages))
    assert [value_of(first), value_of(third)] == [0, 2]
    assert second.error_message == "busy, sorry"
    assert (second.infer_response.model_name, second.infer_response.id) == ("bad", "r1")
    assert not second.infer_response.outputs
    assert "IN" in fourth.error_message
    assert "3 bytes" in fourth.error_message


async def test_error_is_a_status_for_clients_that_ask_for_it() -> None:
    script = _Identity({"bad": BUSY})
    messages = numbered(0), numbered(1, "bad"), numbered(2)
    response = await _stream(script, *messages, metadata=(("triton_grpc_error", "true"),))
    assert len(response.messages) == 1
    assert (response.code, response.text) == (grpc.StatusCode.UNAVAILABLE, "busy, sorry")
    response = await _stream(script, b"\x2a\x05", metadata=(("triton_grpc_error", "true"),))
    assert response.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_models_of_one_route_share_a_stream_and_may_be_replaced() -> None:
    messages = numbered(0), numbered(1, "ö"), numbered(2, "m", "3")
    for route, targets in (
        ({}, ["m/infer", "%C3%B6/infer", "m/versions/3/infer"]),
        ({"rewrite": {"model": "other"}}, ["other/infer", "other/infer", "other/versions/3/infer"]),
    ):
        script = _Identity()
        assert len(read(await _stream(script, *messages, route=route))) == 3
        assert script.targets == [f"/v2/models/{target}" for target in targets]


async def test_client_that_leaves_lets_the_server_go() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.wait_for_close()

    async with (
        ScriptedServer(script) as server,
        running_gateway(server.url) as gateway,
        grpc_client(gateway.url) as client,
    ):
        response = await client.call("ModelStreamInfer", numbered(), timeout=0.5)
        assert response.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await gateway.until_idle()


async def test_line_of_the_log_counts_all_messages(tmp_path: Path) -> None:
    log = tmp_path / "log"
    general = {"log": {"access": {"path": str(log), "format": "json"}}}
    script = _Identity()
    async with _clients(script, general=general) as (gateway, client):
        await client.call("ModelStreamInfer", *map(numbered, range(3)))
        await gateway.until_idle()
    line = json.loads(log.read_text().splitlines()[-1])
    assert (line["attempts"], line["status"], line["grpc_status"]) == (3, 200, 0)
    assert (line["client_form"], line["server_form"]) == ("grpc", "binary")
    assert (line["sent_bytes"], line["received_bytes"]) == (
        script.received_bytes,
        script.sent_bytes,
    )
    assert 0 < line["first_byte_ms"] <= line["server_ms"]
