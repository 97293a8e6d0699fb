"""Clients over gRPC are served by servers over HTTP, as by servers over gRPC."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.codec.grpc.request import read_infer_request
from tests.support.compiled import needs_source
from tests.support.gateway import running_gateway
from tests.support.grpc.client import GrpcResponse, grpc_client, grpc_client_of
from tests.support.grpc.infer_messages import infer_request
from tests.support.grpc.proto_file import message_class
from tests.support.http_messages import http_response
from tests.support.inference_messages import FLOATS, binary_response, metadata
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond

Request = message_class("ModelInferRequest")
Response = message_class("ModelInferResponse")


class _Recorder:
    """A server's script that records requests."""

    def __init__(self, response: bytes) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        self._response = response

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await connection.request()
            method = request.head.first.partition(" ")[0]
            self.requests.append((method, request.head.target, request.body))
            await connection.send(self._response)


async def _infer(script: Script, data: bytes, dialect: str = "triton") -> GrpcResponse:
    async with (
        ScriptedServer(script) as server,
        grpc_client_of(server.url, upstream={"dialect": dialect}) as client,
    ):
        return await client.call("ModelInfer", data)


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
async def test_infer_is_binary_over_http_and_the_response_has_the_form_of_the_request(
    raw: bool,
) -> None:
    script = _Recorder(binary_response(FLOATS.tobytes()))
    response = Response.FromString((await _infer(script, infer_request(typed=not raw))).message)
    (method, target, body) = script.requests[0]
    assert (method, target) == ("POST", "/v2/models/m/infer")
    assert body.endswith(FLOATS.tobytes())
    assert json.loads(body.removesuffix(FLOATS.tobytes()))["id"] == "7"
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("OUT0", "FP32", [3])
    if raw:
        assert response.raw_output_contents == [FLOATS.tobytes()]
    else:
        assert np.array(output.contents.fp32_contents, "<f4").tobytes() == FLOATS.tobytes()


async def test_infer_is_json_for_a_server_of_json_alone() -> None:
    output = {"name": "OUT", "datatype": "FP32", "shape": [3], "data": FLOATS.tolist()}
    script = _Recorder(http_response(json.dumps({"model_name": "m", "outputs": [output]}).encode()))
    response = Response.FromString((await _infer(script, infer_request(), "json")).message)
    (sent,) = json.loads(script.requests[0][2])["inputs"]
    assert sent == {"name": "IN", "datatype": "FP32", "shape": [3], "data": [1.5, -2.0, 3e30]}
    assert response.raw_output_contents == [FLOATS.tobytes()]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("400 Bad Request", grpc.StatusCode.INVALID_ARGUMENT),
        ("503 Busy", grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_error_over_http_becomes_a_status_with_its_text(
    status: str, code: grpc.StatusCode
) -> None:
    error = json.dumps({"error": "größer als 5 %"}).encode()
    response = await _infer(always_respond(http_response(error, status=status)), infer_request())
    assert (response.code, response.text) == (code, "größer als 5 %")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xff\xff", "the request is not valid protobuf"),
        (Request(model_name="m", inputs=[{"name": "IN", "datatype": "FP99"}]), "FP99"),
        (Request(model_name="m", inputs=[{"name": "IN", "datatype": "FP32", "shape": [2]}]), "IN"),
        (Request(model_name="a/../b"), "path"),
    ],
)
async def test_invalid_request_is_refused_before_a_server_sees_it(data: Any, text: str) -> None:
    script = _Recorder(binary_response(FLOATS.tobytes()))
    encoded = data if isinstance(data, bytes) else data.SerializeToString()
    response = await _infer(script, encoded)
    assert response.code is grpc.StatusCode.INVALID_ARGUMENT
    assert text in response.text
    assert not script.requests


async def test_server_that_breaks_off_is_unavailable() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")

    response = await _infer(script, infer_request())
    assert response.code is grpc.StatusCode.UNAVAILABLE
    assert "upstream 'servers'" in response.text


async def _model(connection: Connection) -> None:
    while True:
        head = (await connection.request()).head
        bodies = {
            "/v2/models/m": metadata(-1),
            "/v2/models/m/ready": b"",
            "/v2": b'{"name":"triton","version":"1","extensions":["trace"]}',
            "/v2/repository/index": b'[{"name":"m","version":"1","state":"READY"}]',
            "/v2/models/m/trace/setting": b'{"trace_rate":"1","trace_level":["TIMESTAMPS"]}',
            "/v2/logging": b'{"log_info":true,"log_verbose_level":0}',
            "/v2/health/ready": b"",
        }
        body = bodies.get(head.target)
        if body is None:
            await connection.send(http_response(b'{"error":"unknown"}', status="404 Not Found"))
        else:
            await connection.send(http_response(body))


async def _ask(method: str, **fields: Any) -> tuple[GrpcResponse, Any]:
    request = message_class(f"{method}Request")(**fields).SerializeToString()
    async with ScriptedServer(_model) as server, grpc_client_of(server.url) as client:
        response = await client.call(method, request)
    message = response.messages[0] if response.messages else b""
    return response, message_class(f"{method}Response").FromString(message)


TOLD = [
    ("ServerLive", {}, lambda told: told.live),
    ("ServerReady", {}, lambda told: told.ready),
    ("ModelReady", {"name": "m"}, lambda told: told.ready),
    ("ModelMetadata", {"name": "m"}, lambda told: told.inputs[0].datatype == "FP32"),
    (
        "TraceSetting",
        {"model_name": "m"},
        lambda told: list(told.settings["trace_level"].value) == ["TIMESTAMPS"],
    ),
    ("RepositoryIndex", {}, lambda told: told.models[0].state == "READY"),
    ("LogSettings", {}, lambda told: told.settings["log_info"].bool_param),
]


@pytest.mark.parametrize(("method", "fields", "is_right"), TOLD, ids=[row[0] for row in TOLD])
async def test_operations_beside_inference_are_served_over_http(
    method: str, fields: dict[str, str], is_right: Callable[[Any], bool]
) -> None:
    response, message = await _ask(method, **fields)
    assert response.code is grpc.StatusCode.OK, response.text
    assert is_right(message)


async def test_unready_gateway_says_so_without_an_error() -> None:
    async with (
        ScriptedServer(always_respond(http_response(b"", status="503 Busy"))) as server,
        grpc_client_of(server.url) as client,
    ):
        response = await client.call("ServerReady", b"")
        health = await client.call("/grpc.health.v1.Health/Check", b"")
        live = await client.call("ServerLive", b"")
    assert not message_class("ServerReadyResponse").FromString(response.message).ready
    assert health.message == b"\x08\x02"  # NOT_SERVING
    assert message_class("ServerLiveResponse").FromString(live.message).live


async def test_unknown_model_is_not_found() -> None:
    response, _ = await _ask("ModelMetadata", name="other")
    assert (response.code, response.text) == (grpc.StatusCode.NOT_FOUND, "unknown")


async def test_config_is_made_from_metadata_for_a_server_that_has_none() -> None:
    async with (
        ScriptedServer(_model) as server,
        grpc_client_of(server.url, upstream={"dialect": "json"}) as client,
    ):
        request = message_class("ModelConfigRequest")(name="m").SerializeToString()
        response = await client.call("ModelConfig", request)
    config = message_class("ModelConfigResponse").FromString(response.message).config
    assert config.name == "m"
    assert [each.name for each in config.input] == ["IN"]


async def test_health_is_checked_and_watched() -> None:
    async with ScriptedServer(_model) as server, grpc_client_of(server.url) as client:
        check = await client.call("/grpc.health.v1.Health/Check", b"")
        unknown = await client.call("/grpc.health.v1.Health/Check", b"\x0a\x01x")
        watch = await client.call("/grpc.health.v1.Health/Watch", b"", timeout=0.5)
    assert check.message == b"\x08\x01"
    assert unknown.code is grpc.StatusCode.NOT_FOUND
    assert (watch.code, watch.messages) == (grpc.StatusCode.DEADLINE_EXCEEDED, [b"\x08\x01"])


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


async def test_parameter_of_streams_does_not_reach_a_server_over_http() -> None:
    """Triton refuses it, and perf_analyzer sends it in every request."""
    request = Request.FromString(infer_request())
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    request.parameters["other"].int64_param = 7
    script = _Recorder(binary_response(FLOATS.tobytes()))
    response = await _infer(script, request.SerializeToString())
    assert response.code is grpc.StatusCode.OK, response.text
    header = script.requests[0][2].removesuffix(FLOATS.tobytes())
    assert json.loads(header)["parameters"] == {"binary_data_output": True, "other": 7}


@needs_source
async def test_other_calls_have_their_turn_while_a_large_message_is_read() -> None:
    """Time slices would not do: elements of BYTES cost an iteration each."""
    count = 100_000
    request = Request(model_name="m")
    tensor = request.inputs.add(name="IN", datatype="BYTES", shape=[count])
    tensor.contents.bytes_contents.extend([b"a"] * count)
    message = bytes(request.SerializeToString())
    threads: list[int] = []

    def read(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return read_infer_request(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.proxy.calls.grpc.read_infer_request", read)
        response = await _infer(_Recorder(binary_response(FLOATS.tobytes())), message)
    assert response.code is grpc.StatusCode.OK
    assert threads
    assert threads[0] != threading.get_ident()
