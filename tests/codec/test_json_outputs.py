from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from gateway.codec.json_outputs import binary_answer
from gateway.errors import ErrorKind, GatewayError
from tests.codec.plain import pack_bytes


def entry(datatype: str, shape: list[int], data: Any, **more: Any) -> dict[str, Any]:
    return {"name": "y", "datatype": datatype, "shape": shape, "data": data, **more}


def answer(*outputs: dict[str, Any]) -> bytes:
    return json.dumps({"model_name": "m", "id": None, "outputs": list(outputs)}).encode()


@pytest.mark.parametrize(
    ("made", "data"),
    [
        (entry("FP32", [2, 1], [1, 2.5]), np.array([1, 2.5], "<f4").tobytes()),
        (entry("INT64", [2, 1], [[1], [2**62]]), np.array([1, 2**62], "<i8").tobytes()),
        (entry("BOOL", [1], [True], parameters={"a": 1}), b"\x01"),
        (entry("BYTES", [2], ["a", "é"], parameters=None), pack_bytes([b"a", "é".encode()])),
        (entry("FP32", [0], []), b""),
    ],
)
def test_data_becomes_binary(made: dict[str, Any], data: bytes) -> None:
    header, tensors = binary_answer(answer(made, made))
    fields = json.loads(header)
    assert b"".join(tensors) == data * 2
    for output in fields["outputs"]:
        assert "data" not in output
        expected = (made.get("parameters") or {}) | {"binary_data_size": len(data)}
        assert output["parameters"] == expected


def test_what_is_binary_stays() -> None:
    output = {"name": "y", "datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": 0}}
    header, tensors = binary_answer(answer(output))
    assert (json.loads(header)["outputs"], tensors) == ([output], [])


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (b"no", "not valid JSON"),
        (answer(entry("FP32", [1], 5)), "output 'y' of the server's answer has data that is no"),
        (answer(entry("FP32", [1], [None])), "element 0 (null) is not a number, as FP32 needs"),
        (answer(entry("INT8", [2], [1, 300])), "element 1 (300) does not fit INT8"),
        (answer({"name": "y"}), "lacks a name, shape or known datatype"),
    ],
)
def test_broken_answers(document: bytes, why: str) -> None:
    with pytest.raises(GatewayError) as caught:
        binary_answer(document)
    assert caught.value.kind is ErrorKind.BAD_ANSWER
    assert why in caught.value.message
