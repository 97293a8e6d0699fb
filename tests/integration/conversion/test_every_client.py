"""Every client library gets the same tensors from every server.

NVIDIA's client gets the same through the gateway as from Triton, also by shared memory.
"""

import json
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.infer_messages import Array
from tests.integration.support.python_server import Script
from tests.integration.support.real_server import Reached
from tests.integration.triton.server import HOST, TritonServer

ARRAYS: dict[str, Array] = {
    "FP32": np.array([0.1, -2, 3e38], np.float32),
    "INT64": np.array([2**53 + 1, -(2**63)], np.int64),
    "BYTES": np.array([b"", b"a\0b", "é\n".encode()], object),
    "BOOL": np.array([True, False]),
}


@pytest.fixture(scope="module")
def tritonclient(any_gateway: Gateway) -> Iterator[Any]:
    with triton_http.InferenceServerClient(any_gateway.address) as client:
        yield client


def given(name: str, datatype: str, array: Array, *, binary: bool) -> Any:
    tensor = triton_http.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def as_bytes(array: Array) -> Array:
    """The client gives BYTES as text where they came as JSON."""
    return np.array([each.encode() if isinstance(each, str) else each for each in array], object)


@pytest.mark.parametrize(
    ("sent", "back", "coding"),
    [(True, True, None), (True, False, "gzip"), (False, True, "deflate"), (False, None, None)],
    ids=["binary", "binary to json", "json to binary", "json by default"],
)
def test_tritonclient(tritonclient: Any, sent: bool, back: bool | None, coding: str | None) -> None:
    inputs = [given(f"IN_{name}", name, array, binary=sent) for name, array in ARRAYS.items()]
    outputs = [
        triton_http.InferRequestedOutput(f"OUT_{name}", binary_data=bool(back)) for name in ARRAYS
    ]
    result = tritonclient.infer(
        "mixed",
        inputs,
        outputs=None if back is None else outputs,
        request_compression_algorithm=coding,
    )
    for name, array in ARRAYS.items():
        output = result.get_output(f"OUT_{name}")
        assert (output["datatype"], output["shape"]) == (name, list(array.shape))
        values = result.as_numpy(f"OUT_{name}")
        assert values.dtype == array.dtype
        np.testing.assert_array_equal(as_bytes(values) if name == "BYTES" else values, array)


# What tests/integration/kserve/client.py sends.
OF_KSERVE: dict[str, tuple[str, list[Any]]] = {
    "OUT_FP32": ("float32", np.array([0.1, -2, 3e38, 0], np.float32).tolist()),
    "OUT_INT64": ("int64", [2**53 + 1, -(2**63)]),
    "OUT_BYTES": ("object", ["é", "", "a\0b"]),
    "OUT_BOOL": ("bool", [True, False]),
}
CALLS = ("binary to binary", "json to json", "json to binary", "both to json", "both to both")


def test_kserve_client(any_gateway: Gateway, any_upstream: Reached, kserve_client: Script) -> None:
    asked = json.loads(kserve_client.ask(any_gateway.url))
    for call in CALLS:
        outputs = asked[call]["outputs"]
        listed = {"OUT_BOOL", "OUT_FP32"} if call == "both to both" else set(OF_KSERVE)
        # OpenVINO's server gives all outputs, whichever are listed.
        assert set(outputs) == (set(OF_KSERVE) if any_upstream.name == "openvino" else listed)
        for name, output in outputs.items():
            assert output["datatype"] == name.removeprefix("OUT_")
            assert (output["dtype"], output["values"]) == OF_KSERVE[name]
    for call in ("live", "ready", "model ready"):
        assert asked[call] is True
    assert asked["other model ready"] is False
    if any_upstream.name == "openvino":
        assert asked["halves"]["status"] == 400
        assert "FP16" in asked["halves"]["error"]
    else:
        (output,) = asked["halves"]["outputs"].values()
        assert (output["datatype"], output["dtype"]) == ("FP16", "float16")
        assert output["values"] == np.array([0.1, -2, 65504], np.float16).tolist()


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[Any]:
    with triton_http.InferenceServerClient(gateway.address, concurrency=4) as client:
        yield client


@pytest.fixture(scope="module")
def plain(triton: TritonServer) -> Iterator[Any]:
    """The same client, connected to the server itself."""
    with triton_http.InferenceServerClient(f"{HOST}:{triton.http_port}") as client:
        yield client


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


@pytest.mark.triton
@pytest.mark.parametrize("binary", [True, None])
def test_tensors_in_shared_memory(
    client: Any, plain: Any, region: memoryview, binary: bool | None
) -> None:
    """They never pass the gateway; others in the same request do."""
    left, right = np.array([1, 2.5, -3], np.float32), np.array([3, 4, 5], np.float32)
    region[:12] = left.tobytes()
    shared = triton_http.InferInput("INPUT0", [3], "FP32")
    shared.set_shared_memory("region", 12)
    inputs = [shared, given("INPUT1", "FP32", right, binary=bool(binary))]
    asked = triton_http.InferRequestedOutput("SUM")
    asked.set_shared_memory("region", 12, offset=12)
    outputs = [asked] if binary is None else [asked, wanted("DIFFERENCE", binary=binary)]
    result = client.infer("add", inputs, outputs=outputs)
    assert np.frombuffer(region[12:24], np.float32).tolist() == (left + right).tolist()
    assert result.get_response() == plain.infer("add", inputs, outputs=outputs).get_response()
    if binary is not None:
        assert result.as_numpy("DIFFERENCE").tolist() == (left - right).tolist()


@pytest.mark.triton
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
                [given("INPUT0", "FP32", array, binary=sent)],
                outputs=[wanted("OUTPUT0", binary=back)],
                request_compression_algorithm=request_coding,
                response_compression_algorithm=response_coding,
            )
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
