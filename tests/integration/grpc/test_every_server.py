"""Clients over gRPC get the same tensors from every server, over HTTP and over gRPC."""

import json
import queue
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.integration.support.gateway import Gateway
from tests.integration.support.python_server import Script
from tests.integration.support.real_server import Reached

PATIENCE = 10.0


@pytest.fixture(scope="module")
def client(any_gateway: Gateway) -> Iterator[Any]:
    with triton_grpc.InferenceServerClient(any_gateway.address) as client:
        yield client


ARRAYS: dict[str, Any] = {
    "BOOL": np.array([True, False]),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-(2**15), 3], np.int16),
    "INT32": np.array([-(2**31), 5], np.int32),
    "INT64": np.array([-(2**63), 2**53 + 1], np.int64),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "FP16": np.array([0.1, 65504], np.float16),
    "BF16": np.array([1.5, -2], ml_dtypes.bfloat16),
    "FP32": np.array([0.1, 3e38], np.float32),
    "FP64": np.array([0.1, 5e-324]),
    "BYTES": np.array([b"", b"a\0b", "zwölf".encode()], object),
}


def given(array: Any, datatype: str = "FP32", name: str = "INPUT0") -> Any:
    tensor = triton_grpc.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def lacks(upstream: Reached, datatype: str) -> bool:
    """Tell whether the server has no such model, or no form to answer it in."""
    if datatype == "BF16":
        return upstream.name != "triton"
    return datatype == "FP16" and upstream.name == "openvino"


def test_tritonclient_gets_its_tensor_back(client: Any, any_upstream: Reached) -> None:
    for datatype, array in ARRAYS.items():
        if lacks(any_upstream, datatype):
            continue
        model = f"identity_{datatype.lower()}"
        result = client.infer(model, [given(array, datatype)], request_id="7")
        response = result.get_response()
        assert (response.id, response.model_name) == ("7", model)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_what_tritonclient_asks_beside(client: Any, any_upstream: Reached) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add")
    assert "binary_tensor_data" in client.get_server_metadata().extensions
    metadata = client.get_model_metadata("add")
    assert [each.name for each in metadata.outputs] == ["SUM", "DIFFERENCE"]
    config = client.get_model_config("add").config
    assert [each.name for each in config.input] == ["INPUT0", "INPUT1"]
    assert [list(each.dims) for each in config.output] == [[-1], [-1]]
    if any_upstream.name in ("triton", "mlserver"):
        states = {each.name: each.state for each in client.get_model_repository_index().models}
        assert states["add"].endswith("READY")  # MLServer writes it as State.READY
    if any_upstream.name == "triton":
        assert "trace_level" in client.get_trace_settings().settings
    else:
        with pytest.raises(InferenceServerException, match=r"upstream 'server'.*trace") as raised:
            client.get_trace_settings()
        assert raised.value.status() == "StatusCode.UNIMPLEMENTED"


def test_stream(client: Any, any_upstream: Reached) -> None:
    """Triton's client reads the stream of MLServer, too, and gets one of servers over HTTP."""
    received: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: received.put(error or result))
    array = ARRAYS["FP32"]
    client.async_stream_infer("identity_fp32", [given(array)], request_id="7")
    first = received.get(timeout=PATIENCE)
    if not any_upstream.over_grpc or any_upstream.name in ("triton", "mlserver"):
        assert first.get_response().id == "7"
        np.testing.assert_array_equal(first.as_numpy("OUTPUT0"), array)
        client.async_stream_infer("identity_fp32", [given(array)], request_id="8")
        assert received.get(timeout=PATIENCE).get_response().id in ("7", "8")
    else:
        assert first.status() == "StatusCode.UNIMPLEMENTED"
    client.stop_stream()


# What tests/integration/kserve/grpc_client.py sends.
MIXED = {
    "OUT_FP32": ("FP32", "float32", np.array([0.1, -2, 3e38, 0], np.float32).tolist()),
    "OUT_INT64": ("INT64", "int64", [2**53 + 1, -(2**63)]),
    "OUT_BYTES": ("BYTES", "object", ["é", "", "a\0b"]),
    "OUT_BOOL": ("BOOL", "bool", [True, False]),
}
HALVES = np.array([0.1, -2, 65504], np.float16).tolist()


def test_each_call_of_the_client_of_kserve_ends_as_it_should(
    any_gateway: Gateway, any_upstream: Reached, kserve_grpc_client: Script
) -> None:
    asked = json.loads(kserve_grpc_client.ask(any_gateway.address))
    assert [asked[call] for call in ("live", "ready", "model ready")] == [True] * 3
    for call in ("raw", "typed", "after"):
        outputs = asked[call]["outputs"]
        assert {name: tuple(output.values()) for name, output in outputs.items()} == MIXED
    assert asked["error"]["code"] == "NOT_FOUND"
    if any_upstream.name == "openvino":  # it knows no FP16, and has no slow model
        assert asked["halves"]["code"] == "INVALID_ARGUMENT"
        return
    assert asked["halves"]["outputs"]["OUTPUT0"]["values"] == HALVES
    assert asked["deadline"]["code"] == "DEADLINE_EXCEEDED"
    assert asked["cancel"] is True
