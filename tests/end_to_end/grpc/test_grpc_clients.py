"""Clients over gRPC are served by servers over HTTP, as by servers over gRPC: calls and streams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from gateway.codec.grpc.infer import read_infer_request
from tests.support.compiled import needs_source
from tests.support.gateway import gateway_before, running_gateway
from tests.support.grpc.client import (
    GrpcClient,
    GrpcResponse,
    grpc_client,
    grpc_client_of,
    take_turns,
)
from tests.support.grpc.proto_file import (
    ModelInferRequest,
    ModelInferResponse,
    infer_request,
    message_class,
)
from tests.support.http_messages import http_response
from tests.support.inference_messages import FLOATS, INFER, binary_response, metadata
from tests.support.servers.model_scripts import echoed
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

TENSORS = always_respond(binary_response(FLOATS.tobytes()))


@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
async def test_infer_is_binary_over_http_and_the_response_has_the_form_of_the_request(
    typed: bool,
) -> None:
    """Triton refuses the parameter of streams, which perf_analyzer sends in every request."""
    message = ModelInferRequest.FromString(infer_request(typed=typed))
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.parameters["other"].int64_param = 7
    async with ScriptedServer(TENSORS) as server, grpc_client_of(server.url) as client:
        codings = [("accept-encoding", "gzip"), ("content-encoding", "gzip")]
        answer = await client.call("ModelInfer", message.SerializeToString(), metadata=codings)
    (sent,) = server.requests
    assert sent.head.first == f"POST {INFER} HTTP/1.1"
    assert sent.body.endswith(FLOATS.tobytes())
    fields = json.loads(sent.body.removesuffix(FLOATS.tobytes()))
    assert (fields["id"], fields["parameters"]) == ("7", {"binary_data_output": True, "other": 7})
    # What says how one side sends says nothing of what the other side gets.
    assert sent.head.get("user-agent")
    assert not sent.head.all("accept-encoding") + sent.head.all("content-encoding")
    response = ModelInferResponse.FromString(answer.message)
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("OUT0", "FP32", [3])
    if typed:
        assert list(output.contents.fp32_contents) == FLOATS.tolist()
    else:
        assert response.raw_output_contents == [FLOATS.tobytes()]


DOCUMENTS = {
    "/v2/models/m": metadata(-1),
    "/v2/models/m/ready": b"",
    "/v2/repository/index": b'[{"name":"m","version":"1","state":"READY"}]',
    "/v2/health/ready": b"",
}


async def _model(connection: Any) -> None:
    while True:
        body = DOCUMENTS.get((await connection.request()).head.target)
        status = "200 OK" if body is not None else "404 Not Found"
        await connection.send(http_response(body or b'{"error":"unknown"}', status=status))


async def _ask_rpc(client: GrpcClient, rpc: str, **fields: Any) -> tuple[GrpcResponse, Any]:
    message = message_class(f"{rpc}Request")(**fields).SerializeToString()
    response = await client.call(rpc, message)
    data = response.messages[0] if response.messages else b""
    return response, message_class(f"{rpc}Response").FromString(data)


TOLD: list[tuple[str, dict[str, str], Callable[[Any], bool]]] = [
    ("ServerLive", {}, lambda told: told.live),
    ("ServerReady", {}, lambda told: told.ready),
    ("ModelReady", {"name": "m"}, lambda told: told.ready),
    ("ModelMetadata", {"name": "m"}, lambda told: told.inputs[0].datatype == "FP32"),
    ("RepositoryIndex", {}, lambda told: told.models[0].state == "READY"),
]


async def test_operations_beside_inference_are_served_over_http() -> None:
    async with ScriptedServer(_model) as server, grpc_client_of(server.url) as client:
        for rpc, fields, is_right in TOLD:
            response, message = await _ask_rpc(client, rpc, **fields)
            assert response.code is grpc.StatusCode.OK, response.text
            assert is_right(message), rpc
        response, _ = await _ask_rpc(client, "ModelMetadata", name="other")
        assert (response.code, response.text) == (grpc.StatusCode.NOT_FOUND, "unknown")
        check = await client.call("/grpc.health.v1.Health/Check", b"")
        unknown = await client.call("/grpc.health.v1.Health/Check", b"\x0a\x01x")
        watch = await client.call("/grpc.health.v1.Health/Watch", b"", timeout=0.5)
    assert check.message == b"\x08\x01"
    assert unknown.code is grpc.StatusCode.NOT_FOUND
    assert (watch.code, watch.messages) == (grpc.StatusCode.DEADLINE_EXCEEDED, [b"\x08\x01"])


async def test_unready_gateway_says_so_without_an_error() -> None:
    busy = always_respond(http_response(b"", status="503 Busy"))
    async with ScriptedServer(busy) as server, grpc_client_of(server.url) as client:
        response, ready = await _ask_rpc(client, "ServerReady")
        _, live = await _ask_rpc(client, "ServerLive")
        health = await client.call("/grpc.health.v1.Health/Check", b"")
    assert (ready.ready, live.live) == (False, True)
    assert response.message == b""  # no error
    assert health.message == b"\x08\x02"  # NOT_SERVING


async def test_config_is_made_from_metadata_for_a_server_that_has_none() -> None:
    async with (
        ScriptedServer(_model) as server,
        grpc_client_of(server.url, upstream={"dialect": "json"}) as client,
    ):
        _, told = await _ask_rpc(client, "ModelConfig", name="m")
    assert told.config.name == "m"
    assert [each.name for each in told.config.input] == ["IN"]


@pytest.mark.parametrize("cause", ["drain", "reload"])
async def test_watch_of_health_ends_with_the_gateway_or_its_settings(cause: str) -> None:
    async with (
        ScriptedServer(_model) as server,
        running_gateway(server.url) as gateway,
        grpc_client(gateway.url) as client,
    ):
        watch = client.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=20)
        assert await asyncio.to_thread(next, watch) == b"\x08\x01"
        if cause == "drain":
            gateway.gateway.begin_draining()
        else:
            await gateway.gateway.reload(gateway.gateway.settings)
        with pytest.raises(grpc.RpcError):
            # A gateway that drains is not serving, which comes first.
            await asyncio.to_thread(list, watch)
        assert watch.code() is grpc.StatusCode.UNAVAILABLE


@needs_source
async def test_other_calls_have_their_turn_while_a_large_message_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time slices would not do: elements of BYTES cost an iteration each."""
    message = ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="IN", datatype="BYTES", shape=[100_000])
    tensor.contents.bytes_contents.extend([b"a"] * 100_000)
    threads: list[int] = []

    def read(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return read_infer_request(*args)

    monkeypatch.setattr("gateway.proxy.calls.grpc.read_infer_request", read)
    async with ScriptedServer(TENSORS) as server, grpc_client_of(server.url) as client:
        response = await client.call("ModelInfer", message.SerializeToString())
    assert response.code is grpc.StatusCode.OK
    assert threads[0] != threading.get_ident()


async def test_response_over_the_memory_budget_is_refused() -> None:
    document = json.dumps({"name": "m", "platform": "x" * 3_000_000}).encode()
    async with (
        ScriptedServer(always_respond(http_response(document))) as server,
        grpc_client_of(server.url, max_buffered_bytes="1MiB") as client,
    ):
        response, _ = await _ask_rpc(client, "ModelMetadata", name="m")
    assert response.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_buffered_bytes" in response.text


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_message_above_the_buffer_of_a_body_is_refused(method: str) -> None:
    async with (
        ScriptedServer() as server,
        grpc_client_of(server.url, max_buffered_body_bytes=2**20) as client,
    ):
        response = await client.call(method, infer_request(values=bytes(2**21)))
    assert response.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "limits.max_buffered_body_bytes" in response.text
    assert not server.requests


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
