"""NVIDIA's client gets the same through the gateway as from the server."""

import json
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.integration.support.gateway import Gateway
from tests.integration.support.infer_messages import HALVES, Array
from tests.integration.triton.server import HOST, TritonServer

pytestmark = pytest.mark.triton

ARRAYS: dict[str, Array] = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 1, 255], np.uint8),
    "UINT16": np.array([0, 1, 2**16 - 1], np.uint16),
    "UINT32": np.array([0, 1, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 1, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 0, 127], np.int8),
    "INT16": np.array([-(2**15), 0, 2**15 - 1], np.int16),
    "INT32": np.array([-(2**31), 0, 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 0, 2**63 - 1], np.int64),
    "FP16": np.array([0.1, -2, 65504, np.inf], np.float16),
    "BF16": np.array([0.1, -2, 3e38, -np.inf], ml_dtypes.bfloat16),
    "FP32": np.array([0.1, -2, 3e38, np.nan, np.inf], np.float32),
    "FP64": np.array([0.1, -2, 1e300, np.nan, -np.inf], np.float64),
    "BYTES": np.array([b"", b"a\0b", "é\n".encode()], object),
}
# The client itself refuses to write these as JSON.
IN_JSON = [datatype for datatype in ARRAYS if datatype not in HALVES]


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[Any]:
    client = triton_http.InferenceServerClient(gateway.address, concurrency=4)
    yield client
    client.close()


@pytest.fixture(scope="module")
def plain(triton: TritonServer) -> Iterator[Any]:
    """The same client, connected to the server itself."""
    client = triton_http.InferenceServerClient(f"{HOST}:{triton.http_port}")
    yield client
    client.close()


def tensor(name: str, datatype: str, array: Array, *, binary: bool) -> Any:
    wanted = triton_http.InferInput(name, list(array.shape), datatype)
    wanted.set_data_from_numpy(array, binary_data=binary)
    return wanted


def wanted(name: str, *, binary: bool, class_count: int = 0) -> Any:
    return triton_http.InferRequestedOutput(name, binary_data=binary, class_count=class_count)


def texts(array: Array) -> Array:
    """BYTES come back as text where they were JSON."""
    return np.array([element.decode() for element in array], object)


@pytest.mark.parametrize("datatype", IN_JSON)
@pytest.mark.parametrize(("sent", "back"), [(True, False), (False, True), (False, None)])
def test_each_form_of_each_datatype(
    client: Any, plain: Any, datatype: str, sent: bool, back: bool | None
) -> None:
    array = ARRAYS[datatype]
    inputs = [tensor("INPUT0", datatype, array, binary=sent)]
    outputs = None if back is None else [wanted("OUTPUT0", binary=back)]
    model = f"identity_{datatype.lower()}"
    result = client.infer(model, inputs, outputs=outputs, request_id="17")
    like = plain.infer(model, inputs, outputs=outputs, request_id="17")
    assert _without_data(result) == _without_data(like)
    assert ("data" in result.get_output("OUTPUT0")) == (back is False)
    expected = texts(array) if datatype == "BYTES" and back is False else array
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), expected)


def _without_data(result: Any) -> dict[str, Any]:
    fields = json.loads(json.dumps(result.get_response()))
    for output in fields["outputs"]:
        output.pop("data", None)
    return dict(fields)


@pytest.mark.parametrize("datatype", HALVES)
def test_half_floats(client: Any, plain: Any, datatype: str) -> None:
    """In JSON, too, which the server alone refuses."""
    inputs = [tensor("INPUT0", datatype, ARRAYS[datatype], binary=True)]
    outputs = [wanted("OUTPUT0", binary=False)]
    model = f"identity_{datatype.lower()}"
    assert client.infer(model, inputs).get_response() == plain.infer(model, inputs).get_response()
    with pytest.raises(InferenceServerException):
        plain.infer(model, inputs, outputs=outputs)
    result = client.infer(model, inputs, outputs=outputs)
    data = result.get_output("OUTPUT0")["data"]
    assert np.array(data, ARRAYS[datatype].dtype).tolist() == ARRAYS[datatype].tolist()


@pytest.mark.parametrize("request_id", ["", 'é "quoted"'])
def test_the_request_id_comes_back(client: Any, plain: Any, request_id: str) -> None:
    inputs = [tensor("INPUT0", "FP32", ARRAYS["FP32"], binary=True)]
    result, like = (
        each.infer("identity_fp32", inputs, request_id=request_id) for each in (client, plain)
    )
    assert result.get_response() == like.get_response()
    assert result.get_response().get("id", "") == request_id


@pytest.mark.parametrize("binary", [True, False])
def test_classification(client: Any, plain: Any, binary: bool) -> None:
    inputs = [tensor("INPUT0", "FP32", np.array([0.5, 3, -1], np.float32), binary=binary)]
    outputs = [wanted("OUTPUT0", binary=binary, class_count=2)]
    result, like = (
        each.infer("identity_fp32", inputs, outputs=outputs) for each in (client, plain)
    )
    assert result.get_response() == like.get_response()
    assert result.as_numpy("OUTPUT0").tolist() == like.as_numpy("OUTPUT0").tolist()
    assert len(result.as_numpy("OUTPUT0")) == 2


def test_parameters(client: Any, plain: Any) -> None:
    inputs = [tensor("INPUT0", "FP32", ARRAYS["FP32"], binary=False)]
    outputs = [wanted("OUTPUT0", binary=False)]
    parameters = {"text": "é", "number": 2**53 + 1, "flag": True}
    result, like = (
        each.infer("with_parameters", inputs, outputs=outputs, parameters=parameters)
        for each in (client, plain)
    )
    assert result.get_response() == like.get_response()
    assert json.loads(result.as_numpy("OUTPUT0")[0]) == parameters


@pytest.mark.parametrize(
    ("model", "words"),
    [("nope", "unknown model"), ("fails", "this model always fails"), ("add", "expected 2 inputs")],
)
def test_errors(client: Any, plain: Any, model: str, words: str) -> None:
    inputs = [tensor("INPUT0", "FP32", ARRAYS["FP32"], binary=False)]
    with pytest.raises(InferenceServerException, match=words) as error:
        client.infer(model, inputs)
    with pytest.raises(InferenceServerException) as like:
        plain.infer(model, inputs)
    assert str(error.value) == str(like.value)
    assert error.value.status() == like.value.status()


CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "live": ("is_server_live", ()),
    "ready": ("is_server_ready", ()),
    "model ready": ("is_model_ready", ("add",)),
    "version ready": ("is_model_ready", ("versioned", "2")),
    "unknown model ready": ("is_model_ready", ("nope",)),
    "server metadata": ("get_server_metadata", ()),
    "model metadata": ("get_model_metadata", ("add",)),
    "model config": ("get_model_config", ("batched_fp32", "1")),
    "repository index": ("get_model_repository_index", ()),
    "statistics": ("get_inference_statistics", ("add",)),
    "all statistics": ("get_inference_statistics", ()),
    "log settings": ("get_log_settings", ()),
    "system shared memory": ("get_system_shared_memory_status", ()),
    "CUDA shared memory": ("get_cuda_shared_memory_status", ()),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls(client: Any, plain: Any, call: str) -> None:
    name, arguments = CALLS[call]
    result = getattr(client, name)(*arguments)
    assert result == getattr(plain, name)(*arguments)
    assert result is not None


def test_shared_memory_calls(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="/nope"):
        client.register_system_shared_memory("region", "/nope", 8)
    client.unregister_system_shared_memory("region")
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    assert client.get_system_shared_memory_status() == []


@pytest.fixture
def region(client: Any) -> Iterator[memoryview]:
    """Shared memory of 48 bytes, known to the server as "region"."""
    memory = SharedMemory(create=True, size=48)
    client.register_system_shared_memory("region", f"/{memory.name}", 48)
    assert memory.buf is not None
    yield memory.buf
    client.unregister_system_shared_memory("region")
    memory.close()
    memory.unlink()


@pytest.mark.parametrize("binary", [True, None])
def test_tensors_in_shared_memory(
    client: Any, plain: Any, region: memoryview, binary: bool | None
) -> None:
    """They never pass the gateway; others in the same request do."""
    left, right = np.array([1, 2.5, -3], np.float32), np.array([3, 4, 5], np.float32)
    region[:12] = left.tobytes()
    shared = triton_http.InferInput("INPUT0", [3], "FP32")
    shared.set_shared_memory("region", 12)
    inputs = [shared, tensor("INPUT1", "FP32", right, binary=bool(binary))]
    asked = triton_http.InferRequestedOutput("SUM")
    asked.set_shared_memory("region", 12, offset=12)
    outputs = [asked] if binary is None else [asked, wanted("DIFFERENCE", binary=binary)]
    result = client.infer("add", inputs, outputs=outputs)
    assert np.frombuffer(region[12:24], np.float32).tolist() == (left + right).tolist()
    assert result.get_response() == plain.infer("add", inputs, outputs=outputs).get_response()
    if binary is not None:
        assert result.as_numpy("DIFFERENCE").tolist() == (left - right).tolist()
