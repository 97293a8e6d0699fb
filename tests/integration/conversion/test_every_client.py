"""Every client library gets the same tensors from every server."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

from tests.integration.support.gateway import Gateway
from tests.integration.support.infer_messages import Array
from tests.integration.support.python_server import Script
from tests.integration.support.real_server import Reached

ARRAYS: dict[str, Array] = {
    "FP32": np.array([0.1, -2, 3e38], np.float32),
    "INT64": np.array([2**53 + 1, -(2**63)], np.int64),
    "BYTES": np.array([b"", b"a\0b", "é\n".encode()], object),
    "BOOL": np.array([True, False]),
}


@pytest.fixture(scope="module")
def tritonclient(any_gateway: Gateway) -> Iterator[Any]:
    client = triton_http.InferenceServerClient(any_gateway.address)
    yield client
    client.close()


def given(name: str, datatype: str, array: Array, *, binary: bool) -> Any:
    wanted = triton_http.InferInput(name, list(array.shape), datatype)
    wanted.set_data_from_numpy(array, binary_data=binary)
    return wanted


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
