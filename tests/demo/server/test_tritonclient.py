"""The demo server as NVIDIA's own client sees it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult

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


@pytest.mark.parametrize("datatype", ARRAYS)
@pytest.mark.parametrize("binary", [True, False])
async def test_identity_round_trips_tensors(
    server: DemoServer, datatype: str, binary: bool
) -> None:
    if not binary and datatype in ("FP16", "BF16"):
        return  # they have no JSON form
    array = ARRAYS[datatype]
    given = InferInput("INPUT0", list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    wanted = InferRequestedOutput("OUTPUT0", binary_data=binary)

    def infer() -> InferResult:
        with triton(server.url) as client:
            return client.infer(f"identity_{datatype.lower()}", [given], outputs=[wanted])

    result = await asyncio.to_thread(infer)
    output = result.get_output("OUTPUT0")
    assert (output["datatype"], "data" in output) == (datatype, not binary)
    if datatype == "BYTES" and not binary:
        array = np.array([[each.decode() for each in array[0]]], object)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


async def test_client_reads_metadata(server: DemoServer) -> None:
    def look_up() -> None:
        with triton(server.url) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("add", "1")
            assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
            output = {"name": "SUM", "datatype": "FP32", "shape": [-1]}
            assert client.get_model_metadata("add")["outputs"] == [output]
            assert client.get_model_config("image")["max_batch_size"] == 8
            ready = {"name": "add", "version": "1", "state": "READY"}
            assert ready in client.get_model_repository_index()
            assert client.get_inference_statistics("add")["model_stats"][0]["name"] == "add"
            client.unload_model("half")
            assert not client.is_model_ready("half")
            client.load_model("half")
            assert client.is_model_ready("half")

    await asyncio.to_thread(look_up)
