"""Clients of every form over HTTP are served by servers over gRPC, as by servers over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.gateway import gateway_client
from tests.support.grpc.proto_file import message_class
from tests.support.http_messages import request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    infer_binary,
    infer_json,
    infer_raw,
)
from tests.support.raw_client import RawClient, ReceivedResponse
from tests.support.servers.grpc_server import GrpcServer, fail, grpc_server
from tests.support.servers.http2_server import Http2Peer, http2_script
from tests.support.servers.scripted_server import ScriptedServer


@asynccontextmanager
async def _client(server: GrpcServer, **settings: Any) -> AsyncIterator[RawClient]:
    async with gateway_client(server.url, **settings) as client:
        yield client


async def _ask(server: GrpcServer, data: bytes) -> ReceivedResponse:
    async with _client(server) as client:
        return await client.ask(data)


def _json(response: ReceivedResponse) -> Any:
    return json.loads(response.body)


ELEMENTS: list[tuple[str, list[Any]]] = [
    ("BOOL", [True, False, True]),
    ("INT64", [-(2**63), 2**63 - 1]),
    ("UINT64", [0, 2**64 - 1]),
    ("BF16", [1.5, -2.0]),
    ("FP32", [1.5, -2.0, 3.4028235e38]),
    ("BYTES", ["", "zwölf", "a\nb"]),
]


@pytest.mark.parametrize(("datatype", "data"), ELEMENTS, ids=[name for name, _ in ELEMENTS])
async def test_json_of_each_datatype_travels_there_and_back(
    server: GrpcServer, datatype: str, data: list[Any]
) -> None:
    entry = {"name": "IN", "datatype": datatype, "shape": [len(data)], "data": data}
    body = json.dumps({"id": "7", "inputs": [entry]}).encode()
    response = await _ask(server, infer_json(body))
    assert response.status == 200, response.body
    assert _json(response) == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "outputs": [{**entry, "name": "OUT"}],
    }
    (sent,) = [message_class("ModelInferRequest").FromString(each) for each in server.requests]
    assert sent.raw_input_contents
    assert not sent.inputs[0].contents.ByteSize()
    assert server.paths == ["/inference.GRPCInferenceService/ModelInfer"]


async def test_binary_form_travels_there_and_back(server: GrpcServer) -> None:
    entry = {"name": "IN", "datatype": "FP32", "shape": [3], "parameters": {"binary_data_size": 12}}
    header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    response = await _ask(server, infer_binary(header, FLOATS.tobytes()))
    size = int(response.head.get(HEADER_LENGTH) or 0)
    assert json.loads(response.body[:size])["outputs"] == [{**entry, "name": "OUT"}]
    assert response.body[size:] == FLOATS.tobytes()


async def test_raw_binary_is_read_by_metadata_over_grpc(server: GrpcServer) -> None:
    response = await _ask(server, infer_raw(FLOATS.tobytes()))
    assert response.status == 200, response.body
    assert FLOATS.tobytes() in response.body
    assert [path.rpartition("/")[2] for path in server.paths] == [
        "ModelMetadata",
        "ModelConfig",  # whether its first dimension is the batch
        "ModelInfer",
    ]


async def test_prediction_of_v1_is_served_over_grpc(server: GrpcServer) -> None:
    response = await _ask(
        server, request("POST", "/v1/models/m:predict", b'{"instances": [1.5, -2.0]}')
    )
    assert _json(response)["predictions"] == [1.5, -2.0]


async def test_large_streamed_request_is_sent_as_one_message(server: GrpcServer) -> None:
    values = np.arange(500_000, dtype="<f4")
    entry = {
        "name": "IN",
        "datatype": "FP32",
        "shape": [values.size],
        "parameters": {"binary_data_size": values.nbytes},
    }
    header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    response = await _ask(server, infer_binary(header, values.tobytes()))
    assert response.body.endswith(values.tobytes())


ERRORS = [
    (grpc.StatusCode.INVALID_ARGUMENT, 400),
    (grpc.StatusCode.UNAVAILABLE, 503),
]


@pytest.mark.parametrize(("code", "status"), ERRORS, ids=[code.name for code, _ in ERRORS])
async def test_error_of_the_server_becomes_a_status_and_its_text(
    code: grpc.StatusCode, status: int
) -> None:
    with grpc_server(unary={"ModelInfer": fail(code, "größer als 5 %")}) as server:
        async with _client(server) as client:
            response = await client.ask(infer_json())
    assert response.status == status
    assert _json(response) == {"error": "größer als 5 %"}


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_response_that_is_compressed_unasked_is_read(encoding: str) -> None:
    """Servers on Go compress if they are set to, whatever the client says that it reads."""
    response = message_class("ModelInferResponse")(model_name="m")
    response.outputs.add(name="OUT", datatype="FP32", shape=FLOATS.shape)
    response.raw_output_contents.append(FLOATS.tobytes())
    in_stream = message_class("ModelStreamInferResponse")(infer_response=response)
    tensor = message_class("ModelMetadataResponse").TensorMetadata(
        name="IN", datatype="FP32", shape=[-1]
    )
    documents = {
        "ModelInfer": response.SerializeToString(),
        "ModelMetadata": message_class("ModelMetadataResponse")(
            name="m", inputs=[tensor], outputs=[tensor]
        ).SerializeToString(),
        "ModelConfig": b"",
        "ModelStreamInfer": in_stream.SerializeToString(),
    }

    async def play(peer: Http2Peer) -> None:
        for number in range(9):
            try:
                stream = await peer.request(number)
            except asyncio.IncompleteReadError:
                return
            assert "grpc-accept-encoding" not in dict(stream.headers)
            message = documents[stream.path.rpartition("/")[2]]
            message = gzip.compress(message) if encoding == "gzip" else zlib.compress(message)
            await peer.respond(
                stream,
                b"\1" + len(message).to_bytes(4) + message,
                [("content-type", "application/grpc"), ("grpc-encoding", encoding)],
                [("grpc-status", "0")],
            )

    async with (
        ScriptedServer(http2_script(play)) as server,
        gateway_client(server.url.replace("http:", "grpc:")) as client,
    ):
        inferred = await client.ask(infer_json())
        metadata = await client.ask(request("GET", "/v2/models/m"))
        generated = await client.ask(request("POST", "/v2/models/m/generate", b'{"IN": [1]}'))
    assert inferred.status == 200, inferred.body
    numbers = pytest.approx(FLOATS.ravel().tolist())
    assert _json(inferred)["outputs"][0]["data"] == numbers
    assert _json(metadata)["name"] == "m"
    assert generated.status == 200, generated.body
    assert _json(generated)["OUT"] == numbers


OPERATIONS = [
    ("/v2/health/live", {"live": True}),
    ("/v2/health/ready", {"ready": True}),
    ("/v2", {"name": "triton", "version": "2.51.0", "extensions": ["binary_tensor_data"]}),
]


@pytest.mark.parametrize(("path", "expected"), OPERATIONS)
async def test_operations_beside_inference_are_served_over_grpc(
    server: GrpcServer, path: str, expected: Any
) -> None:
    response = await _ask(server, request("GET", path))
    assert (response.status, _json(response)) == (200, expected)


async def test_metadata_of_a_model_is_that_of_http(server: GrpcServer) -> None:
    response = await _ask(server, request("GET", "/v2/models/m"))
    tensor = {"datatype": "FP32", "shape": [-1]}
    assert _json(response) == {
        "name": "m",
        "versions": ["1"],
        "platform": "identity",
        "inputs": [{"name": "IN", **tensor}],
        "outputs": [{"name": "OUT", **tensor}],
    }


async def test_extension_that_the_server_lacks_is_named(server: GrpcServer) -> None:
    response = await _ask(server, request("GET", "/v2/logging"))
    assert response.status == 501
    assert "upstream 'servers' does not serve LogSettings" in _json(response)["error"]


async def test_operation_that_grpc_does_not_have_is_refused(server: GrpcServer) -> None:
    response = await _ask(server, request("POST", "/v2/models/m/explain", b"{}"))
    assert response.status == 501
    assert "gRPC" in _json(response)["error"]


NAMELESS = [
    infer_json().replace(b"/models/m/", b"/models/a%FFb/"),
    infer_raw(FLOATS.tobytes()).replace(b"/models/m/", b"/models/a%FFb/"),
    infer_json().replace(b"/models/m/", b"/models/m/versions/a%FFb/"),
    request("GET", "/v2/models/a%FFb"),
    request("POST", "/v2/models/a%FFb/generate", b"{}"),
    request("POST", "/v1/models/a%FFb:predict", b'{"instances": [1]}'),
    request("POST", "/v2/repository/models/a%FFb/load", b"{}"),
]


@pytest.mark.parametrize("data", NAMELESS, ids=range(len(NAMELESS)))
async def test_name_that_protobuf_cannot_have_is_refused(data: bytes, server: GrpcServer) -> None:
    """It must not become that of another model."""
    response = await _ask(server, data)
    assert response.status == 400, response.body
    assert '"a%FFb", which is not UTF-8 when it is decoded' in response.error
    assert server.requests == []


async def test_replacement_character_is_a_name(server: GrpcServer) -> None:
    async with _client(server) as client:
        data = infer_json().replace(b"/models/m/", b"/models/%EF%BF%BD/")
        assert (await client.ask(data)).status == 200
    assert message_class("ModelInferRequest").FromString(server.requests[-1]).model_name == "\ufffd"
