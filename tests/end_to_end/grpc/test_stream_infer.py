"""Streams of gRPC clients are served by servers over HTTP: a request for each message, in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.support.gateway import gateway_before
from tests.support.grpc.client import (
    GrpcResponse,
    grpc_client,
    grpc_client_of,
    take_turns,
)
from tests.support.grpc.proto_file import infer_request
from tests.support.http_messages import http_response
from tests.support.servers.model_scripts import echoed
from tests.support.servers.scripted_server import Connection, ScriptedServer, never_respond

BUSY = http_response(b'{"error": "busy, sorry"}', status="503 Busy")


async def _identity(connection: Connection) -> None:
    """Return the tensor of each request; the model "bad" fails."""
    while True:
        received = await connection.request()
        is_bad = "/bad/" in received.head.target
        await connection.send(BUSY if is_bad else echoed(received))


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


async def _stream(
    *messages: bytes,
    metadata: Sequence[tuple[str, str | bytes]] = (),
    compression: grpc.Compression | None = None,
    **settings: Any,
) -> tuple[GrpcResponse, list[str]]:
    """Make a call; return its response, and the targets that the server was asked for."""
    async with (
        ScriptedServer(_identity) as server,
        grpc_client_of(server.url, **settings) as client,
    ):
        response = await client.call(
            "ModelStreamInfer", *messages, metadata=metadata, compression=compression
        )
    return response, [each.head.target for each in server.requests]


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
async def test_each_message_gets_its_response_in_order(
    compression: grpc.Compression | None,
) -> None:
    response, targets = await _stream(*map(numbered, range(5)), compression=compression)
    found = read(response)
    assert [value_of(message) for message in found] == [0, 1, 2, 3, 4]
    assert [message.infer_response.id for message in found] == ["r0", "r1", "r2", "r3", "r4"]
    for message in found:
        assert message.infer_response.parameters["triton_final_response"].bool_param
        assert message.infer_response.outputs[0].name == "OUT"
    assert targets == ["/v2/models/m/infer"] * 5


async def test_response_comes_before_the_next_request_is_sent() -> None:
    async with ScriptedServer(_identity) as server, grpc_client_of(server.url) as client:
        found = await take_turns(client, *map(numbered, range(3)))
    messages = map(service_pb2.ModelStreamInferResponse.FromString, found)
    assert list(map(value_of, messages)) == [0, 1, 2]


async def test_error_is_a_message_and_the_stream_goes_on() -> None:
    invalid = service_pb2.ModelInferRequest(model_name="m", id="7")
    invalid.inputs.add(name="IN", datatype="FP32", shape=[2])
    invalid.raw_input_contents.append(b"abc")
    messages = numbered(0), numbered(1, "bad"), numbered(2), invalid.SerializeToString()
    first, second, third, fourth = read((await _stream(*messages))[0])
    assert [value_of(first), value_of(third)] == [0, 2]
    assert second.error_message == "busy, sorry"
    assert (second.infer_response.model_name, second.infer_response.id) == ("bad", "r1")
    assert not second.infer_response.outputs
    assert "IN" in fourth.error_message
    assert "3 bytes" in fourth.error_message


async def test_error_is_a_status_for_clients_that_ask_for_it() -> None:
    wish = (("triton_grpc_error", "true"),)
    response, _ = await _stream(numbered(0), numbered(1, "bad"), numbered(2), metadata=wish)
    assert len(response.messages) == 1
    assert (response.code, response.text) == (grpc.StatusCode.UNAVAILABLE, "busy, sorry")
    response, _ = await _stream(b"\x2a\x05", metadata=wish)
    assert response.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_models_of_one_route_share_a_stream_and_may_be_replaced() -> None:
    messages = numbered(0), numbered(1, "ö"), numbered(2, "m", "3")
    for route, targets in (
        ({}, ["m/infer", "%C3%B6/infer", "m/versions/3/infer"]),
        ({"rewrite": {"model": "other"}}, ["other/infer", "other/infer", "other/versions/3/infer"]),
    ):
        response, asked = await _stream(*messages, route=route)
        assert len(read(response)) == 3
        assert asked == [f"/v2/models/{target}" for target in targets]


async def test_client_that_leaves_lets_the_server_go() -> None:
    async with gateway_before(never_respond) as (_, gateway), grpc_client(gateway.url) as client:
        response = await client.call("ModelStreamInfer", numbered(), timeout=0.5)
        assert response.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await gateway.until_idle()


async def test_line_of_the_log_counts_all_messages(tmp_path: Path) -> None:
    log = tmp_path / "log"
    general = {"log": {"access": {"path": str(log), "format": "json"}}}
    async with gateway_before(_identity, general=general) as (server, gateway):
        async with grpc_client(gateway.url) as client:
            await client.call("ModelStreamInfer", *map(numbered, range(3)))
        await gateway.until_idle()
    line = json.loads(log.read_text().splitlines()[-1])
    assert (line["attempts"], line["status"], line["grpc_status"]) == (3, 200, 0)
    assert (line["client_form"], line["server_form"]) == ("grpc", "binary")
    responses = [echoed(each).partition(b"\r\n\r\n")[2] for each in server.requests]
    assert line["sent_bytes"] == sum(len(each.body) for each in server.requests)
    assert line["received_bytes"] == sum(map(len, responses))
    assert 0 < line["first_byte_ms"] <= line["server_ms"]
