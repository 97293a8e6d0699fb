"""NVIDIA's client gets the same through the gateway as from the server."""

from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.infer_messages import Array
from tests.integration.triton.server import HOST, TritonServer

pytestmark = pytest.mark.triton


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


def wanted(name: str, *, binary: bool) -> Any:
    return triton_http.InferRequestedOutput(name, binary_data=binary)


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


def test_compression_both_ways(triton: TritonServer, tmp_path: Path) -> None:
    array = np.arange(3000, dtype=np.float32)
    route = {"compression": ["gzip", "deflate"]}
    with (
        running_gateway(tmp_path, triton.http_url, route=route) as gateway,
        triton_http.InferenceServerClient(gateway.address) as client,
    ):
        for request_coding, response_coding, sent, back in (
            (None, "gzip", True, False),
            ("gzip", "deflate", False, True),
            ("deflate", None, True, True),
        ):
            result = client.infer(
                "identity_fp32",
                [tensor("INPUT0", "FP32", array, binary=sent)],
                outputs=[wanted("OUTPUT0", binary=back)],
                request_compression_algorithm=request_coding,
                response_compression_algorithm=response_coding,
            )
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
