"""Clients over gRPC get from Triton through the gateway what they get without it."""

import math
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

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


def test_settings_are_changed(direct: Any, via_gateway: Any) -> None:
    value = service_pb2.TraceSettingRequest.SettingValue
    changes = {"trace_rate": value(value=["77"]), "trace_level": value(value=["OFF"])}
    request = request_of("TraceSetting", model_name="add", settings=changes)
    changed = outcome(via_gateway, "TraceSetting", request)
    assert changed.settings["trace_rate"].value == ["77"]
    read = request_of("TraceSetting", model_name="add")
    assert outcome(direct, "TraceSetting", read) == changed
    cleared = request_of(
        "TraceSetting", model_name="add", settings={name: value() for name in changes}
    )
    assert outcome(via_gateway, "TraceSetting", cleared) == outcome(
        direct, "TraceSetting", request_of("TraceSetting")
    )


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


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Any]:
    with triton_grpc.InferenceServerClient(gateway.address) as client:
        yield client


ARRAY = np.array([0.1, 5e-324])


def tensor_of(array: Any, datatype: str = "FP32", name: str = "INPUT0") -> Any:
    tensor = triton_grpc.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


class Stream:
    """What a client's stream receives."""

    def __init__(self, client: Any, **options: Any) -> None:
        self.results: list[Any] = []
        self._received = threading.Condition()
        client.start_stream(self._receive, **options)

    def _receive(self, result: Any, error: Any) -> None:
        with self._received:
            self.results.append(error if error is not None else result)
            self._received.notify_all()

    def wait(self, count: int) -> list[Any]:
        """Wait for so many responses and errors."""
        with self._received:
            assert self._received.wait_for(lambda: len(self.results) >= count, PATIENCE)
            return self.results


def text_input() -> Any:
    return tensor_of(np.array([b"hello"], object), "BYTES", "text_input")


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_one_stream_has_calls_of_several_models_and_errors_among_them(
    client: Any, compression: str | None
) -> None:
    stream = Stream(client, compression_algorithm=compression, headers={"x-of-client": "1"})
    client.async_stream_infer("identity_fp64", [tensor_of(ARRAY, "FP64")])
    stream.wait(1)
    client.async_stream_infer("nope", [tensor_of(ARRAY, "FP64")])
    stream.wait(2)
    client.async_stream_infer("stream", [text_input()])
    first, error, *pieces = stream.wait(7)
    client.stop_stream()
    np.testing.assert_array_equal(first.as_numpy("OUTPUT0"), ARRAY)
    assert isinstance(error, InferenceServerException)
    assert "unknown model: 'nope'" in str(error)
    assert len(pieces) == 5


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


def test_classification_of_numbers_is_that_of_triton(direct: Any, via_gateway: Any) -> None:
    request = _classified("identity_fp32", "FP32", np.array([1, 2], "<f4").tobytes())
    found = outcome(via_gateway, "ModelInfer", request)
    assert found == outcome(direct, "ModelInfer", request)
    assert found.raw_output_contents
