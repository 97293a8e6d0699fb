"""Clients of every form over HTTP are served by servers over gRPC, as by servers over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.protocol.grpc.framing import frame
from tests.support.gateway import gateway_client, running_gateway, until
from tests.support.grpc.proto_file import ModelInferRequest, message_class
from tests.support.http_messages import request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    binary_header,
    infer_binary,
    infer_json,
    infer_raw,
)
from tests.support.raw_client import ReceivedResponse
from tests.support.servers.grpc_server import GrpcServer, fail
from tests.support.servers.http2_server import Http2Peer, http2_script
from tests.support.servers.scripted_server import ScriptedServer


async def _ask(server: GrpcServer, *requests: bytes) -> list[ReceivedResponse]:
    async with gateway_client(server.url) as client:
        return [await client.ask(data) for data in requests]


ELEMENTS: dict[str, list[Any]] = {
    "BOOL": [True, False, True],
    "UINT64": [0, 2**64 - 1],
    "BF16": [1.5, -2.0],
    "BYTES": ["", "zwölf", "a\nb"],
}


@pytest.mark.parametrize(("datatype", "data"), ELEMENTS.items(), ids=ELEMENTS)
async def test_json_travels_there_and_back(
    server: GrpcServer, datatype: str, data: list[Any]
) -> None:
    entry = {"name": "IN", "datatype": datatype, "shape": [len(data)], "data": data}
    (response,) = await _ask(
        server, infer_json(json.dumps({"id": "7", "inputs": [entry]}).encode())
    )
    assert response.status == 200, response.body
    assert response.json == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "outputs": [{**entry, "name": "OUT"}],
    }
    (sent,) = map(ModelInferRequest.FromString, server.requests)
    assert sent.raw_input_contents
    assert not sent.inputs[0].contents.ByteSize()


async def test_other_forms_travel_there_and_back(server: GrpcServer) -> None:
    tensor = np.arange(500_000, dtype="<f4").tobytes()
    large = infer_binary(binary_header(len(tensor), binary_output=True), tensor)
    predict = request("POST", "/v1/models/m:predict", b'{"instances": [1.5, -2.0]}')
    binary, raw, predicted = await _ask(server, large, infer_raw(FLOATS.tobytes()), predict)
    size = int(binary.head.get(HEADER_LENGTH) or 0)
    (output,) = json.loads(binary.body[:size])["outputs"]
    assert output["parameters"] == {"binary_data_size": len(tensor)}
    assert binary.body[size:] == tensor
    assert FLOATS.tobytes() in raw.body
    assert predicted.json == {"predictions": [1.5, -2.0]}
    # A raw request is read by the metadata; the config says if its first dimension is the batch.
    rpcs = [path.rpartition("/")[2] for path in server.paths]
    assert rpcs[:4] == ["ModelInfer", "ModelMetadata", "ModelConfig", "ModelInfer"]


async def test_fields_of_grpc_in_a_request_over_http_do_not_reach_the_server(
    server: GrpcServer,
) -> None:
    fields = {"grpc-timeout": "soon", "grpc-encoding": "none", "X-Own": "1"}
    get = request("GET", "/v2/models/m", headers=fields)
    assert [each.status for each in await _ask(server, infer_json(headers=fields), get)] == [
        200
    ] * 2
    assert all(dict(metadata)["x-own"] == "1" for metadata in server.metadata)


@pytest.mark.parametrize(
    ("code", "status"),
    [(grpc.StatusCode.INVALID_ARGUMENT, 400), (grpc.StatusCode.UNAVAILABLE, 503)],
)
async def test_error_of_the_server_becomes_a_status_and_its_text(
    server: GrpcServer, code: grpc.StatusCode, status: int
) -> None:
    server.unary["ModelInfer"] = fail(code, "größer als 5 %")
    (response,) = await _ask(server, infer_json())
    assert (response.status, response.error) == (status, "größer als 5 %")


async def test_response_that_is_compressed_unasked_is_read() -> None:
    """Servers on Go compress if they are set to, whatever the client says that it reads."""
    response = message_class("ModelInferResponse")(model_name="m")
    response.outputs.add(name="OUT", datatype="FP32", shape=FLOATS.shape)
    response.raw_output_contents.append(FLOATS.tobytes())
    tensors = [{"name": "IN", "datatype": "FP32", "shape": [-1]}]
    described = message_class("ModelMetadataResponse")(name="m", inputs=tensors, outputs=tensors)
    in_stream = message_class("ModelStreamInferResponse")(infer_response=response)
    documents = {
        "ModelInfer": response.SerializeToString(),
        "ModelMetadata": described.SerializeToString(),
        "ModelConfig": b"",
        "ModelStreamInfer": in_stream.SerializeToString(),
    }

    async def play(peer: Http2Peer) -> None:
        with suppress(asyncio.IncompleteReadError):
            for number in itertools.count():
                stream = await peer.request(number)
                assert "grpc-accept-encoding" not in dict(stream.headers)
                message = gzip.compress(documents[stream.path.rpartition("/")[2]])
                await peer.respond(
                    stream,
                    b"\1" + len(message).to_bytes(4) + message,
                    [("content-type", "application/grpc"), ("grpc-encoding", "gzip")],
                    [("grpc-status", "0")],
                )

    async with (
        ScriptedServer(http2_script(play)) as server,
        gateway_client(server.url.replace("http:", "grpc:")) as client,
    ):
        inferred = await client.ask(infer_json())
        metadata = await client.ask(request("GET", "/v2/models/m"))
        generated = await client.ask(request("POST", "/v2/models/m/generate", b'{"IN": [1]}'))
    numbers = pytest.approx(FLOATS.tolist())
    assert inferred.json["outputs"][0]["data"] == numbers
    assert metadata.json["name"] == "m"
    assert generated.json["OUT"] == numbers


async def test_operations_beside_inference_are_served_over_grpc(server: GrpcServer) -> None:
    tensor = {"datatype": "FP32", "shape": [-1]}
    expected = {
        "/v2/health/ready": {"ready": True},
        "/v2": {"name": "triton", "version": "2.51.0", "extensions": ["binary_tensor_data"]},
        "/v2/models/m": {
            "name": "m",
            "versions": ["1"],
            "platform": "identity",
            "inputs": [{"name": "IN", **tensor}],
            "outputs": [{"name": "OUT", **tensor}],
        },
    }
    replies = await _ask(server, *(request("GET", path) for path in expected))
    assert [(each.status, each.json) for each in replies] == [
        (200, document) for document in expected.values()
    ]


async def test_operation_that_the_server_or_grpc_lacks_is_named(server: GrpcServer) -> None:
    lacking, unknown = await _ask(
        server, request("GET", "/v2/logging"), request("POST", "/v2/models/m/explain", b"{}")
    )
    assert (lacking.status, unknown.status) == (501, 501)
    assert "upstream 'servers' does not serve LogSettings" in lacking.error
    assert "gRPC" in unknown.error


NAMELESS = [
    infer_json().replace(b"/models/m/", b"/models/a%FFb/"),
    infer_raw(FLOATS.tobytes()).replace(b"/models/m/", b"/models/a%FFb/"),
    infer_json().replace(b"/models/m/", b"/models/m/versions/a%FFb/"),
    request("GET", "/v2/models/a%FFb"),
    request("POST", "/v2/models/a%FFb/generate", b"{}"),
    request("POST", "/v1/models/a%FFb:predict", b'{"instances": [1]}'),
    request("POST", "/v2/repository/models/a%FFb/load", b"{}"),
]


async def test_name_that_protobuf_cannot_have_is_refused(server: GrpcServer) -> None:
    """It must not become that of another model."""
    for response in await _ask(server, *NAMELESS):
        assert response.status == 400, response.body
        assert '"a%FFb", which is not UTF-8 when it is decoded' in response.error
    assert server.requests == []


async def test_message_that_is_buffered_counts_in_the_memory_budget() -> None:
    size = 1_000_000

    async def play(peer: Http2Peer) -> None:
        stream = await peer.request()
        message = frame(size) + bytes(size - 1)
        await peer.respond(stream, message, [("content-type", "application/grpc")], end=False)
        await peer.serve_to_end()

    async with (
        ScriptedServer(http2_script(play)) as server,
        running_gateway(server.url.replace("http://", "grpc://")) as gateway,
    ):
        budget = gateway.gateway.active_config.router.memory_budget
        async with gateway.client() as client:
            await client.send(infer_json())
            await until(lambda: budget.buffers.reserved >= size)
