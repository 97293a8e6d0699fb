"""Clients over gRPC get from Triton through the gateway what they get without it."""

import math
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.integration.support.client_forms import open_channel, stub_of
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.triton.server import HOST, TritonServer

pytestmark = pytest.mark.triton

PATIENCE = 10.0


@pytest.fixture(scope="module")
def gateway(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of Triton's gRPC port."""
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(folder, triton.grpc_url, dialect="auto") as running:
        yield running


@pytest.fixture(scope="module")
def direct(triton: TritonServer) -> Iterator[Any]:
    with open_channel(f"{HOST}:{triton.grpc_port}") as channel:
        yield stub_of(channel)


@pytest.fixture(scope="module")
def via_gateway(gateway: Gateway) -> Iterator[Any]:
    with open_channel(gateway.address) as channel:
        yield stub_of(channel)


def outcome(stub: Any, rpc: str, request: Any) -> Any:
    """Return the response, or code and text of the error."""
    try:
        return getattr(stub, rpc)(request, timeout=PATIENCE)
    except grpc.RpcError as error:
        return error.code(), error.details()


def request_of(rpc: str, **fields: Any) -> Any:
    return getattr(service_pb2, f"{rpc}Request")(**fields)


def infer_request(
    model: str = "identity_fp32", shape: tuple[int, ...] = (3,), **fields: Any
) -> Any:
    request = request_of("ModelInfer", model_name=model, **fields)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=shape)
    size = math.prod(shape)
    request.raw_input_contents.append(np.arange(size, dtype=np.float32).tobytes())
    return request


def typed_request() -> Any:
    request = request_of("ModelInfer", model_name="identity_fp32", id="8")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[2])
    tensor.contents.fp32_contents.extend([0.1, -2])
    return request


CALLS: dict[str, tuple[str, Any]] = {
    "server metadata": ("ServerMetadata", request_of("ServerMetadata")),
    "no model metadata": ("ModelMetadata", request_of("ModelMetadata")),
    "config": ("ModelConfig", request_of("ModelConfig", name="batched_fp32")),
    "index": ("RepositoryIndex", request_of("RepositoryIndex", ready=True)),
    "load unknown": ("RepositoryModelLoad", request_of("RepositoryModelLoad", model_name="nope")),
    "cuda register": (
        "CudaSharedMemoryRegister",
        request_of("CudaSharedMemoryRegister", name="r", raw_handle=b"\0" * 64, byte_size=8),
    ),
    "infer typed": ("ModelInfer", typed_request()),
    "infer an image": ("ModelInfer", infer_request("image", (1, 3, 224, 224))),
    "infer of an unknown version": ("ModelInfer", infer_request(model_version="9")),
    "infer that fails": ("ModelInfer", infer_request("fails", (1,))),
    "infer decoupled": ("ModelInfer", infer_request("stream")),
    "infer nothing": ("ModelInfer", request_of("ModelInfer", model_name="add")),
}
"""Calls that pass: what Triton does with them is not the gateway's."""


@pytest.mark.parametrize(("rpc", "request_"), CALLS.values(), ids=CALLS)
def test_unary_call_has_the_same_outcome(
    direct: Any, via_gateway: Any, rpc: str, request_: Any
) -> None:
    # In this order, so that what is loaded has been loaded.
    expected = outcome(direct, rpc, request_)
    assert outcome(via_gateway, rpc, request_) == expected


CONFIG_OF_ZEROS = """{
  "name": "zeros", "backend": "python", "max_batch_size": 0,
  "input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [1]}],
  "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
  "instance_group": [{"kind": "KIND_CPU", "count": 1}],
  "parameters": {"color": {"string_value": "red"}}
}"""


def test_model_is_unloaded_and_loaded(direct: Any, via_gateway: Any) -> None:
    request = request_of("RepositoryModelUnload", model_name="zeros")
    assert (
        outcome(via_gateway, "RepositoryModelUnload", request)
        == service_pb2.RepositoryModelUnloadResponse()
    )
    ready = request_of("ModelReady", name="zeros")
    try:
        assert not outcome(direct, "ModelReady", ready).ready
        assert not outcome(via_gateway, "ModelReady", ready).ready
    finally:
        config = {"config": service_pb2.ModelRepositoryParameter(string_param=CONFIG_OF_ZEROS)}
        load = request_of("RepositoryModelLoad", model_name="zeros", parameters=config)
        loaded = outcome(via_gateway, "RepositoryModelLoad", load)
    assert loaded == service_pb2.RepositoryModelLoadResponse()
    assert outcome(via_gateway, "ModelReady", ready).ready
    config = outcome(via_gateway, "ModelConfig", request_of("ModelConfig", name="zeros")).config
    assert config.parameters["color"].string_value == "red"


def _classified(model: str, datatype: str, raw: bytes) -> Any:
    request = request_of("ModelInfer", model_name=model)
    request.inputs.add(name="INPUT0", datatype=datatype, shape=[2])
    request.raw_input_contents.append(raw)
    request.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 1
    return request


def test_classification_of_strings_kills_no_triton(direct: Any, via_gateway: Any) -> None:
    """Triton 2.51 dies as it compares them."""
    request = _classified("identity_bytes", "BYTES", b"\1\0\0\0a\1\0\0\0b")
    code, text = outcome(via_gateway, "ModelInfer", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == "output 'OUTPUT0' of model 'identity_bytes' is BYTES, which cannot be classified"
    assert outcome(direct, "ServerLive", request_of("ServerLive")).live
