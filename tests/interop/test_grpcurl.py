"""grpcurl: it learns from the gateway's reflection what to call, without a .proto file."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gateway.demo.server.server import DemoServer
from tests.interop.programs import go_program
from tests.support.gateway import running_gateway
from tests.support.gateway_process import run
from tests.support.servers.grpc_server import grpc_server

GRPCURL = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4"
SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
]
MESSAGE = "inference.ModelInferRequest"
INFER = "inference.GRPCInferenceService/ModelInfer"
CONTENTS = {"fp32Contents": [0.5, -2]}
TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "contents": CONTENTS}
REQUEST = json.dumps({"model_name": "identity_fp32", "inputs": [TENSOR]})


async def _grpcurl(url: str, *arguments: str, options: Sequence[str] = ()) -> str:
    address = url.partition("://")[2]
    command = (go_program(GRPCURL), "-plaintext", "-max-time", "20", *options, address)
    status, out, err = await run(*command, *arguments)
    assert status == 0, out + err
    return out


async def test_services_are_described_and_models_are_called() -> None:
    async with DemoServer() as server:
        with grpc_server() as grpc:
            for url in (server.url, grpc.url):
                async with running_gateway(url) as gateway:
                    assert (await _grpcurl(gateway.url, "list")).split() == SERVICES
                    described = await _grpcurl(
                        gateway.url, "describe", "inference.ModelInferRequest"
                    )
                    assert "repeated bytes raw_input_contents = 7;" in described
                    out = await _grpcurl(gateway.url, INFER, options=["-d", REQUEST])
                    (output,) = json.loads(out)["outputs"]
                    assert output["contents"] == CONTENTS
                    out = await _grpcurl(gateway.url, "grpc.health.v1.Health/Check")
                    assert json.loads(out) == {"status": "SERVING"}
