"""Requests of many values in few bytes are refused before anything parses them."""

from __future__ import annotations

import pytest

from gateway.codec.json.parse_cost import VALUES_PER_TENSOR, check_value_count
from gateway.codec.v1.request import PredictRequestReader
from gateway.codec.v2.buffered_request import read_buffered_json
from gateway.codec.v2.request import InferRequestReader
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.tensors import MAX_TENSORS, ModelMetadata, TensorSpec

_MAX = VALUES_PER_TENSOR * MAX_TENSORS
_CAPS = (1 << 20, 64)
_TENSOR = b'{"name":"x","datatype":"FP32","shape":[1],"data":[1]}'


def _array(values: int, value: bytes = b"1") -> bytes:
    return b"[%b]" % b",".join([value] * values)


@pytest.mark.parametrize("value", [b"1", b"[]", b"{}", b'"a,[{"', b'{"a":1}'])
def test_value_count_has_a_limit(value: bytes) -> None:
    opened = 1 + value.startswith((b"[", b"{"))  # the array, and the value itself
    fits = (_MAX - 1) // opened
    check_value_count(_array(fits, value))
    with pytest.raises(GatewayError, match=f"more than {_MAX} values") as raised:
        check_value_count(_array(fits + 2, value))
    assert raised.value.kind is ErrorKind.TOO_LARGE


def test_marks_in_strings_are_no_values() -> None:
    check_value_count(b'{"prompt":"%b"}' % (b"a, [b], {c}\\" + b'"' + b", " * _MAX))


def test_limit_grows_with_that_of_tensors() -> None:
    check_value_count(_array(2 * _MAX), 2 * MAX_TENSORS)


_MANY = _array(_MAX + 2, b"{}")


@pytest.mark.parametrize(
    "body",
    [
        b'{"parameters":{"p":%b},"inputs":[%b]}' % (_MANY, _TENSOR),
        b'{"inputs":[%b],"parameters":{"p":%b}}' % (_TENSOR, _MANY),
        b'{"inputs":[%b,{"p":%b,"data":[1]}]}' % (_TENSOR, _MANY),
        b'{"p":%b,"data":[1]}' % _MANY,
    ],
    ids=["before", "behind", "in a tensor", "outside of tensors"],
)
@pytest.mark.parametrize("part", [1 << 20, 1000])
def test_infer_request_of_many_values_is_refused(body: bytes, part: int) -> None:
    parts = [body[start : start + part] for start in range(0, len(body), part)]
    with pytest.raises(GatewayError, match=r"values: 32 for each tensor .*max_tensors") as raised:
        _read(parts)
    assert raised.value.kind is ErrorKind.TOO_LARGE


def test_deep_nesting_is_named_first() -> None:
    with pytest.raises(GatewayError, match="nested deeper than 64") as raised:
        _read([b"[" * (_MAX + 2)])
    assert raised.value.kind is ErrorKind.BAD_REQUEST


def _read(parts: list[bytes]) -> None:
    reader = InferRequestReader(*_CAPS)
    for part in parts:
        reader.feed(part)
    reader.feed(b"", last=True)
    reader.finish()


@pytest.mark.parametrize("key", [b"parameters", b"unknown"])
def test_prediction_of_many_values_is_refused(key: bytes) -> None:
    model = ModelMetadata("m", (TensorSpec("x", DATATYPES["FP32"], (-1,)),), batching=False)
    reader = PredictRequestReader(model, *_CAPS)
    reader.feed(b'{"%b":%b,"instances":[1]}' % (key, _MANY), last=True)
    with pytest.raises(GatewayError, match="values") as raised:
        list(iter(reader.step, False))
    assert raised.value.kind is ErrorKind.TOO_LARGE
    reader.close()


def test_small_request_of_many_tensors_is_left_to_time_slices() -> None:
    few, many = (
        b'{"\\u0069d":"","inputs":[%b]}' % b",".join([_TENSOR] * count) for count in (10, 500)
    )
    assert read_buffered_json(few, *_CAPS, MAX_TENSORS) is not None
    assert read_buffered_json(many, *_CAPS, MAX_TENSORS) is None
