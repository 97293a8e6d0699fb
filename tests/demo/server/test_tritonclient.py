"""The demo server as NVIDIA's own client sees it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.http import (
    InferenceServerClient,
    InferInput,
    InferRequestedOutput,
    InferResult,
)
from tritonclient.utils import InferenceServerException

from gateway.demo.server.server import DemoServer

Array = npt.NDArray[Any]

ARRAYS: dict[str, Array] = {
    "BOOL": np.array([[True, False, True]]),
    "UINT8": np.array([[0, 1, 255]], np.uint8),
    "UINT16": np.array([[0, 1, 2**16 - 1]], np.uint16),
    "UINT32": np.array([[0, 1, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 1, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 0, 127]], np.int8),
    "INT16": np.array([[-(2**15), 0, 2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31), 0, 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 0, 2**63 - 1]], np.int64),
    "FP16": np.array([[0.5, -2, 65504]], np.float16),
    "BF16": np.array([[0.5, -2, 3e38]], ml_dtypes.bfloat16),
    "FP32": np.array([[0.1, -2, 3e38]], np.float32),
    "FP64": np.array([[0.1, -2, 1e300]], np.float64),
    "BYTES": np.array([[b"", b"a\0b", "é".encode()]], object),
}


@contextmanager
def triton(url: str) -> Iterator[InferenceServerClient]:
    client = InferenceServerClient(url.removeprefix("http://"))
    try:
        yield client
    finally:
        client.close()


def tensor(name: str, datatype: str, array: Array, *, binary: bool) -> InferInput:
    wanted = InferInput(name, list(array.shape), datatype)
    wanted.set_data_from_numpy(array, binary_data=binary)
    return wanted


async def infer(server: DemoServer, model: str, *inputs: InferInput, **options: Any) -> InferResult:
    def call() -> InferResult:
        with triton(server.url) as client:
            return client.infer(model, list(inputs), **options)

    return await asyncio.to_thread(call)


@pytest.mark.parametrize("datatype", ARRAYS)
async def test_identity_round_trips_binary_tensors(server: DemoServer, datatype: str) -> None:
    array = ARRAYS[datatype]
    result = await infer(
        server,
        f"identity_{datatype.lower()}",
        tensor("INPUT0", datatype, array, binary=True),
        outputs=[InferRequestedOutput("OUTPUT0", binary_data=True)],
    )
    output = result.get_output("OUTPUT0")
    assert (output["datatype"], "data" in output) == (datatype, False)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


@pytest.mark.parametrize("datatype", [d for d in ARRAYS if d not in ("FP16", "BF16")])
async def test_identity_round_trips_json_tensors(server: DemoServer, datatype: str) -> None:
    array = ARRAYS[datatype]
    result = await infer(
        server,
        f"identity_{datatype.lower()}",
        tensor("INPUT0", datatype, array, binary=False),
        outputs=[InferRequestedOutput("OUTPUT0", binary_data=False)],
    )
    assert "parameters" not in result.get_output("OUTPUT0")
    texts = result.as_numpy("OUTPUT0")
    given = np.array([[e.decode() for e in array[0]]], object) if datatype == "BYTES" else array
    np.testing.assert_array_equal(texts, given)


async def test_inputs_and_outputs_may_mix_json_and_binary(server: DemoServer) -> None:
    left, right = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    result = await infer(
        server,
        "add",
        tensor("INPUT0", "FP32", left, binary=True),
        tensor("INPUT1", "FP32", right, binary=False),
        request_id="7",
    )
    assert result.get_response()["id"] == "7"
    np.testing.assert_array_equal(result.as_numpy("SUM"), left + right)


async def test_error_reaches_the_client(server: DemoServer) -> None:
    inputs = tensor("INPUT0", "FP32", np.zeros(1, np.float32), binary=True)
    with pytest.raises(InferenceServerException, match="missing required input 'INPUT1'") as error:
        await infer(server, "add", inputs)
    assert error.value.status() == "400"


@pytest.fixture
async def looked_up(server: DemoServer) -> dict[str, Any]:
    def call() -> dict[str, Any]:
        with triton(server.url) as client:
            return {
                "live": client.is_server_live(),
                "ready": client.is_server_ready(),
                "model ready": client.is_model_ready("add", "1"),
                "server": client.get_server_metadata(),
                "model": client.get_model_metadata("add"),
                "config": client.get_model_config("image"),
                "index": client.get_model_repository_index(),
                "statistics": client.get_inference_statistics("add"),
                "unloaded": client.unload_model("half"),
                "half ready": client.is_model_ready("half"),
                "loaded": client.load_model("half"),
                "half ready again": client.is_model_ready("half"),
            }

    return await asyncio.to_thread(call)


async def test_client_reads_metadata(looked_up: dict[str, Any]) -> None:
    assert (looked_up["live"], looked_up["ready"], looked_up["model ready"]) == (True, True, True)
    assert "binary_tensor_data" in looked_up["server"]["extensions"]
    assert looked_up["model"]["outputs"] == [{"name": "SUM", "datatype": "FP32", "shape": [-1]}]
    assert looked_up["config"]["max_batch_size"] == 8
    assert {"name": "add", "version": "1", "state": "READY"} in looked_up["index"]
    assert looked_up["statistics"]["model_stats"][0]["name"] == "add"
    assert (looked_up["half ready"], looked_up["half ready again"]) == (False, True)
