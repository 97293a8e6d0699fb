"""More tensors than the cap are refused in every form, in the same words, and early."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.codec.json.parse_cost import VALUES_PER_TENSOR, check_value_count
from gateway.codec.policies import JsonPolicies
from gateway.codec.v1.request import PredictRequestReader
from gateway.codec.v2.json_writer import JsonRequestWriter
from gateway.codec.v2.request import (
    InferRequestReader,
    read_buffered_json,
    read_json_fast,
    read_without_data,
)
from gateway.codec.v2.response import ResponseEncoder, json_converter
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.response_header import MAX_OUTPUTS
from gateway.protocol.tensors import MAX_TENSORS, ModelMetadata, TensorSpec
from tests.codec.reference_v1 import Declared
from tests.codec.strategies_v1 import model
from tests.codec.v2.conversions import Failed, chunks, outcome

CAP = 3
TOO_MANY = "the request has more than 3 inputs (limits.max_tensors)"


def tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1], **fields}


DATA = tensor(data=[1])
TEXT = tensor(datatype="BYTES", data=["a"])
BINARY = tensor(parameters={"binary_data_size": 4})
SHARED = tensor(parameters={"shared_memory_region": "r"})


def request(inputs: list[dict[str, Any]], outputs: int = 0) -> bytes:
    fields: dict[str, Any] = {"inputs": inputs}
    if outputs:
        fields["outputs"] = [{"name": "y"}] * outputs
    return json.dumps(fields).encode()


def convert(body: bytes) -> None:
    codec = InferRequestReader(1 << 20, 64, tensor_cap=CAP)
    codec.feed(body, last=True)
    codec.finish()


def convert_header(header: bytes) -> object:
    return read_without_data(header, 64, CAP)


def refusal(convert: Callable[[bytes], object], body: bytes) -> str:
    with pytest.raises(GatewayError) as caught:
        convert(body)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    return caught.value.message


@pytest.mark.parametrize("entry", [DATA, TEXT, BINARY, SHARED])
def test_more_inputs_than_the_cap_are_refused(entry: dict[str, Any]) -> None:
    for read in (convert, convert_header) if entry is BINARY else (convert,):
        read(request([entry] * CAP))
        assert refusal(read, request([entry] * (CAP + 1))) == TOO_MANY
        assert refusal(read, request([SHARED] * CAP + [entry])) == TOO_MANY
    convert(request([DATA], CAP))
    assert refusal(convert, request([DATA], CAP + 1)) == (
        "the request asks for more than 3 outputs (limits.max_tensors)"
    )


@pytest.mark.parametrize(
    "entry", ['{"data":[1]', '{"data":[1],"name":"x","datatype":"FP32","shape":[1]']
)
def test_inputs_are_counted_while_they_arrive(entry: str) -> None:
    codec = InferRequestReader(1 << 20, 64, tensor_cap=CAP)
    codec.feed(b'{"inputs":[' + b"},".join([entry.encode()] * CAP) + b"}")
    while codec.step():
        pass
    # The error does not wait for the end of the array.
    assert refusal(codec.feed, b',{"data":[') == TOO_MANY


def test_fast_path_leaves_requests_over_the_cap() -> None:
    for entry in (DATA, SHARED):
        assert read_json_fast(request([entry] * CAP), 64, CAP) is not None
        assert read_json_fast(request([entry] * (CAP + 1)), 64, CAP) is None
    assert read_json_fast(request([DATA], CAP + 1), 64, CAP) is None


def test_v1_requests_for_a_model_over_the_cap_are_refused() -> None:
    declared: Declared = {f"x{number}": ("FP32", [-1]) for number in range(CAP + 1)}
    with pytest.raises(GatewayError) as caught:
        PredictRequestReader(model(declared), 1000, 64, CAP)
    assert (caught.value.kind, caught.value.message) == (ErrorKind.BAD_REQUEST, TOO_MANY)
    PredictRequestReader(model(declared), 1000, 64, CAP + 1)


def test_a_request_within_a_larger_cap_is_written_as_json() -> None:
    # For a server that accepts JSON only; admitted tensors are not counted again.
    count = 1500
    header = request([BINARY] * count)
    message = read_without_data(header, 64, count)
    assert message is not None
    writer = JsonRequestWriter(message, JsonPolicies())
    text = writer.feed(bytes(4 * count)) + writer.finish()
    assert len(json.loads(text)["inputs"]) == count


def test_more_outputs_than_the_cap_are_a_bad_response() -> None:
    words = f"the server's response has more than {MAX_OUTPUTS} outputs"
    header = json.dumps({"outputs": [BINARY] * (MAX_OUTPUTS + 1)}).encode()
    with pytest.raises(GatewayError) as caught:
        json_converter(len(header), JsonPolicies(), 1 << 24, 1 << 24).text(header)
    assert (caught.value.kind, caught.value.message) == (ErrorKind.BAD_RESPONSE, words)
    body = json.dumps({"outputs": [DATA] * (MAX_OUTPUTS + 1)}).encode()
    codec = ResponseEncoder(None, OutputEncoding(True, {}), JsonPolicies(), 1 << 20, 1 << 20)
    codec.feed(body[: -len("]}")])  # before the end
    with pytest.raises(GatewayError) as caught:
        list(iter(codec.step, False))
    assert (caught.value.kind, caught.value.message) == (ErrorKind.BAD_RESPONSE, words)


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
    found = outcome(chunks(body, part))
    assert isinstance(found, Failed)
    assert found.kind is ErrorKind.TOO_LARGE
    assert found.message.endswith(
        "values: 32 for each tensor that it may have (limits.max_tensors)"
    )


def test_deep_nesting_is_named_first() -> None:
    assert outcome([b"[" * (_MAX + 2)], depth_cap=64) == Failed(
        ErrorKind.BAD_REQUEST, "the request's JSON is nested deeper than 64"
    )


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
