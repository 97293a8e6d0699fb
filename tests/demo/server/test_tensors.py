import math
from typing import Any

import numpy as np
import pytest

from gateway.demo.server.errors import RequestError
from gateway.demo.server.tensors import (
    NamedFloat,
    Tensor,
    from_binary,
    from_json,
    to_json,
)


def test_fp32_is_printed_as_an_exact_double() -> None:
    assert to_json(from_json("x", "FP32", [1], [0.1])) == [0.10000000149011612]


@pytest.mark.parametrize(
    "data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[1, 2, 3], [4]], [1, [[2]], [3, 4]]]
)
def test_json_data_may_be_nested_in_any_way(data: list[Any]) -> None:
    assert from_json("x", "INT32", [2, 2], data).array.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("datatype", "element"),
    [
        ("BOOL", 1),
        ("UINT8", 300),
        ("UINT8", -1),
        ("INT32", 1.0),
        ("INT32", True),
        ("INT32", -(2**31) - 1),
        ("INT64", 2**63),
        ("INT64", NamedFloat("nan")),
        ("UINT64", -1),
        ("FP32", True),
        ("FP32", "1"),
        ("FP32", None),
        ("FP32", {}),
        ("FP32", 1e40),
        ("FP64", math.inf),  # what a parser makes of 1e400
        ("FP64", 10**400),
        ("BYTES", 1),
        ("BYTES", "\ud83d"),
    ],
)
def test_element_out_of_range_is_rejected(datatype: str, element: object) -> None:
    with pytest.raises(RequestError, match="'x'") as rejected:
        from_json("x", datatype, [1], [element])
    assert rejected.value.status == 400


def test_error_names_the_element() -> None:
    with pytest.raises(RequestError, match="takes UINT8: element 2 is 300"):
        from_json("x", "UINT8", [2, 2], [[1, 2], [300, 4]])


def test_infinity_by_name_is_accepted() -> None:
    names = [NamedFloat("nan"), NamedFloat("inf"), NamedFloat("-inf")]
    data = to_json(from_json("x", "FP32", [3], names))
    assert math.isnan(data[0])
    assert data[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_16_bit_floats_have_no_json_form(datatype: str) -> None:
    with pytest.raises(RequestError, match=f"receiving {datatype} data via JSON"):
        from_json("x", datatype, [1], [1.0])
    with pytest.raises(RequestError, match=f"sending {datatype} data via JSON"):
        to_json(from_binary("x", datatype, [1], b"\0\0"))


def test_bytes_that_are_not_utf8_have_no_json_form() -> None:
    with pytest.raises(RequestError, match="'x' is not UTF-8"):
        to_json(Tensor("x", "BYTES", np.array([b"\xff"], object)))


@pytest.mark.parametrize(
    ("shape", "data"),
    [([2], [1]), ([1], [1, 2]), ([], []), ([2], 5), ([0], [1]), ([0, 2**70], []), ([1] * 99, [1])],
)
def test_json_data_must_fit_the_shape(shape: list[int], data: object) -> None:
    with pytest.raises(RequestError):
        from_json("x", "FP32", shape, data)


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("FP32", [2], bytes(7)),
        ("FP32", [2], bytes(9)),
        ("BYTES", [1], b"\1\0\0"),
        ("BYTES", [1], b"\5\0\0\0abcd"),
        ("BYTES", [2], b"\4\0\0\0abcd"),
        ("FP31", [1], bytes(4)),
    ],
)
def test_binary_data_must_fit_the_shape(datatype: str, shape: list[int], data: bytes) -> None:
    with pytest.raises(RequestError):
        from_binary("x", datatype, shape, data)
