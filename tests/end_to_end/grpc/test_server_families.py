"""What server families do in their own way over gRPC: gateway/protocol/dialects.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import grpc
import numpy as np
import pytest

from tests.support.gateway import running_gateway
from tests.support.grpc.client import grpc_client, grpc_client_of
from tests.support.grpc.infer_messages import infer_request
from tests.support.grpc.proto_file import message_class
from tests.support.http_messages import request
from tests.support.inference_messages import FLOATS, infer_json
from tests.support.servers.grpc_server import grpc_server, infer_identity, respond

TORCHSERVE = "/org.pytorch.serve.grpc.openinference.GRPCInferenceService"

MLSERVER = respond("ServerMetadataResponse", name="mlserver", version="1.7.1")
KSERVE = respond("ServerMetadataResponse", name="kserve", version="0.21.0")


def stream_bare(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterable[bytes]:
    """Respond to a stream as MLServer does."""
    for message in requests:
        yield infer_identity(message, context)


async def test_stream_of_mlserver_has_the_messages_of_triton() -> None:
    values = np.arange(250_000, dtype="<f4").tobytes()
    sent = infer_request(values=values), infer_request()
    mlserver = {"ServerMetadata": MLSERVER}
    with grpc_server(unary=mlserver, streams={"ModelStreamInfer": stream_bare}) as server:
        async with grpc_client_of(server.url, upstream={"dialect": "auto"}) as client:
            response = await client.call(
                "ModelStreamInfer", *sent, compression=grpc.Compression.Gzip
            )
    assert response.code is grpc.StatusCode.OK, response.text
    read = map(message_class("ModelStreamInferResponse").FromString, response.messages)
    tensors = [each.infer_response.raw_output_contents for each in read]
    assert tensors == [[values], [FLOATS.tobytes()]]


@pytest.mark.parametrize("rpc", ["RepositoryModelLoad", "RepositoryModelUnload"])
async def test_kserve_gets_the_model_to_load_in_its_own_field(rpc: str) -> None:
    sent: list[bytes] = []

    def load(data: bytes, _context: grpc.ServicerContext) -> bytes:
        sent.append(data)
        return b"\n\x01m\x10\x01"

    with grpc_server(unary={"ServerMetadata": KSERVE, rpc: load}) as server:
        async with (
            running_gateway(server.url, upstream={"dialect": "auto"}) as gateway,
            grpc_client(gateway.url) as client,
            gateway.client() as http_client,
        ):
            loading = message_class(f"{rpc}Request")(model_name="m").SerializeToString()
            response = await client.call(rpc, loading)
            action = rpc.removeprefix("RepositoryModel").lower()
            over_http = await http_client.ask(
                request("POST", f"/v2/repository/models/m/{action}", b"{}")
            )
    assert response.code is grpc.StatusCode.OK, response.text
    assert sent == [b"\n\x01m"] * 2
    assert json.loads(over_http.body) == {"name": "m", action: True}


_READY = respond("ServerReadyResponse", ready=True)


async def test_torchserve_has_a_service_of_its_own_and_gets_typed_contents() -> None:
    methods = {f"{TORCHSERVE}/ModelInfer": infer_identity, f"{TORCHSERVE}/ServerReady": _READY}
    with grpc_server(unary=methods) as server:
        async with (
            running_gateway(server.url, upstream={"dialect": "torchserve"}) as gateway,
            grpc_client(gateway.url) as client,
            gateway.client() as http_client,
        ):
            response = await client.call("ModelInfer", infer_request())
            entry = {"name": "IN", "datatype": "FP32", "shape": [3], "data": [1.5, -2.0, 3e30]}
            body = json.dumps({"inputs": [entry]}).encode()
            over_http = await http_client.ask(infer_json(body))
            ready = await http_client.ask(request("GET", "/v2/models/m/ready"))
    assert {path.rpartition("/")[0] for path in server.paths} == {TORCHSERVE}
    requests = [message_class("ModelInferRequest").FromString(each) for each in server.requests[:2]]
    assert [list(each.inputs[0].contents.fp32_contents) for each in requests] == [
        FLOATS.tolist(),
        FLOATS.tolist(),
    ]
    assert not any(each.raw_input_contents for each in requests)
    read = message_class("ModelInferResponse").FromString(response.message)
    assert read.raw_output_contents == [FLOATS.tobytes()]
    assert json.loads(over_http.body)["outputs"] == [{**entry, "name": "OUT"}]
    assert ready.status == 501
