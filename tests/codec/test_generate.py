"""Triton's generate extension: members become inputs or parameters, outputs become members."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.generate import (
    MAX_OUTSIDE_STRINGS,
    GenerateBodyCheck,
    GenerateRequest,
    read_generate_request,
    write_event,
    write_generate_error,
    write_generate_response,
)
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import InferResponse, InferResponseHead, OutputTensor
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.sizes import ENCODE_CHUNK
from tests.codec.grpc.infer_messages import raw_data
from tests.support.checks.refused import refused_with

DEPTH_CAP = 64


def model(**shapes: tuple[str, list[int]]) -> ModelMetadata:
    specs = [
        TensorSpec(name, DATATYPES[datatype], tuple(shape))
        for name, (datatype, shape) in shapes.items()
    ]
    return ModelMetadata("m", tuple(specs), None)


TEXT = model(text=("BYTES", [1]), stop=("BOOL", [1]))


def read(body: bytes | dict[str, Any], of: ModelMetadata = TEXT) -> GenerateRequest:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    GenerateBodyCheck(DEPTH_CAP).feed(text)
    return read_generate_request(text, of)


def inputs(request: GenerateRequest) -> list[Any]:
    document = json.loads(request.infer_json)
    assert list(document) == ["inputs"]
    return list(document["inputs"])


def test_members_are_inputs_or_parameters() -> None:
    request = read({"id": "7", "text": "hi", "p": 1, "parameters": {"stop": True, "q": "x"}})
    assert inputs(request) == [
        {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["hi"]},
        {"name": "stop", "datatype": "BOOL", "shape": [1], "data": [True]},
    ]
    # Triton has the id among the parameters, too.
    assert request.parameters == {"id": "7", "p": 1, "q": "x"}
    assert request.id == "7"


def test_request_without_inputs_is_read() -> None:
    assert read(b"{}") == GenerateRequest(None, {}, b'{"inputs": []}')


SHAPES: list[tuple[list[int], int, list[int] | None]] = [
    ([1], 1, [1]),
    ([1], 2, None),
    ([], 1, []),
    ([-1], 5, [5]),
    ([-1], 0, [0]),
    ([-1, 4], 8, [2, 4]),
    ([-1, 4], 6, None),
    ([-1, -1], 3, [1, 3]),
    ([2, -1], 6, [2, 3]),
    ([0], 1, None),
    ([-1, 0], 1, None),
]


@pytest.mark.parametrize(("declared", "count", "shape"), SHAPES)
def test_shape_is_filled_as_by_triton(
    declared: list[int], count: int, shape: list[int] | None
) -> None:
    of = model(x=("INT32", declared))
    body = {"x": list(range(count))}
    if shape is None:
        with pytest.raises(GatewayError, match=rf"input 'x' has {count} elements"):
            read(body, of)
    else:
        assert inputs(read(body, of))[0]["shape"] == shape


def test_numbers_keep_their_values() -> None:
    of = model(x=("FP64", [-1]))
    (tensor,) = inputs(read(b'{"x": [NaN, -Infinity, 18446744073709551616, 0.1, 1e-7]}', of))
    assert repr(tensor["data"]) == "[nan, -inf, 18446744073709551616, 0.1, 1e-07]"


PARAMETERS: list[tuple[str, Any]] = [
    ("true", True),
    ("-5", -5),
    ("9223372036854775807", 2**63 - 1),
    ("9223372036854775808", 2.0**63),
    ("-9223372036854775809", -(2.0**63)),
    ("1.0", 1.0),
    ('"x"', "x"),
]


@pytest.mark.parametrize(("text", "value"), PARAMETERS)
def test_parameter_has_the_type_of_triton(text: str, value: Any) -> None:
    (found,) = read(f'{{"p": {text}}}'.encode()).parameters.values()
    assert (type(found), found) == (type(value), value)


INVALID = [
    (b"", "no JSON"),
    (b"\xff", "no JSON"),
    (b"[]", "must be a JSON object, got an array"),
    (b'{"id": 5}', "id must be a string, got 5"),
    (b'{"p": null}', "'p' is no input of the model"),
    (b'{"p": 1' + b"0" * 400 + b"}", "'p'"),
    (b'{"p": 1' + b"0" * 5000 + b"}", "no JSON"),
    (b'{"parameters": 5}', "parameters must be an object, got 5"),
    (b'{"text": "a", "parameters": {"text": "b"}}', "input 'text' is given twice"),
    (b'{"p": 1, "p": 1}', '"p" twice'),
    (b'{"p": "\\ud83d"}', "surrogate"),
    (b'{"\\ud83d": 1}', "surrogate"),
    (b'{"text": "a"} x', "no JSON"),
    (b'{"text": "a" "p": 1}', "no JSON"),
    (b"[" * 100 + b"]" * 100, "nested deeper than 64"),
    (b'{"text": "a",}', "no JSON"),
    (b'{"text" "a"}', "no JSON"),
    (b'{5: "a"}', "no JSON"),
    (b'{"parameters": {"p": 1, "p": 1}}', '"p" twice'),
]


@pytest.mark.parametrize(("body", "text"), INVALID)
def test_invalid_request_names_what_is_wrong(body: bytes, text: str) -> None:
    with refused_with(ErrorKind.BAD_REQUEST, text):
        read(body)


def test_input_that_no_member_can_name_is_told() -> None:
    with pytest.raises(GatewayError, match="input 'parameters'"):
        read({"parameters": {}}, model(parameters=("BYTES", [1])))
    assert inputs(read({}, model(parameters=("BYTES", [1])))) == []


def test_only_texts_may_be_large() -> None:
    size = 4 * MAX_OUTSIDE_STRINGS
    for filling in (b"a", b'\\"', b"\\\\", b"[", b"\\n,"):
        body = b'{"text": "' + filling * (size // len(filling)) + b'"}'
        assert inputs(read(body))[0]["shape"] == [1]
    with refused_with(ErrorKind.TOO_LARGE):
        read(b'{"text": [' + b"1," * (MAX_OUTSIDE_STRINGS // 2) + b"1]}")


@given(st.text(alphabet='"\\a1[', max_size=20), st.lists(st.integers(0, 40), max_size=5))
def test_what_is_outside_of_strings_does_not_depend_on_cuts(text: str, cuts: list[int]) -> None:
    body = text.encode()
    ends = [*sorted(cuts), len(body)]
    whole, parts = GenerateBodyCheck(DEPTH_CAP), GenerateBodyCheck(DEPTH_CAP)
    whole.feed(body)
    start = 0
    for end in ends:
        parts.feed(body[start:end])
        start = max(start, min(end, len(body)))
    rest = b"\\" if whole._carry else b""
    assert (parts._outside, parts._inside, parts._carry) == (whole._outside, whole._inside, rest)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(["id", "text", "stop", "parameters", "p"]) | st.text(max_size=3)


@given(st.dictionaries(_NAMES, _VALUES, max_size=5), st.booleans())
def test_any_request_is_read_or_refused(members: dict[str, Any], is_ascii: bool) -> None:
    body = json.dumps(members, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    try:
        request = read(body)
    except GatewayError as error:
        assert error.kind is ErrorKind.BAD_REQUEST  # noqa: PT017
        return
    nested = members.get("parameters", {})
    every = {**{k: v for k, v in members.items() if k != "parameters"}, **nested}
    found = {tensor["name"]: tensor["data"] for tensor in inputs(request)}
    names = {"text", "stop"}
    expected = {k: v if isinstance(v, list) else [v] for k, v in every.items() if k in names}
    assert repr(found) == repr({name: expected[name] for name in found})
    assert set(found) == set(expected)
    assert set(request.parameters) == set(every) - names


# -------------------------------------------------------------------------------- responses


Outputs = dict[str, tuple[str, list[int], Any]]


def pieces(tensor: OutputTensor, data: bytes) -> list[Any]:
    response = InferResponse(InferResponseHead((tensor,)))
    return [*write_generate_response(response, [[data]], JsonPolicies(), {})]


def write(
    outputs: Outputs,
    request_id: str | None = None,
    parameters: dict[str, Any] | None = None,
    policies: JsonPolicies | None = None,
) -> bytes:
    data = [raw_data(datatype, values) for datatype, _, values in outputs.values()]
    tensors = tuple(
        OutputTensor(name, DATATYPES[datatype], tuple(shape), len(raw))
        for (name, (datatype, shape, _)), raw in zip(outputs.items(), data, strict=True)
    )
    response = InferResponse(InferResponseHead(tensors, "m", "1", parameters or {}), request_id)
    policies, hidden = policies or JsonPolicies(), {"hidden": True}
    return b"".join(write_generate_response(response, [[raw] for raw in data], policies, hidden))


def test_members_are_in_the_order_of_their_names() -> None:
    outputs: Outputs = {
        "text_output": ("BYTES", [1], [b"hi"]),
        "Z": ("INT32", [2], [1, 2]),
        "a": ("BOOL", [1], [True]),
        "é": ("FP32", [1], [0.5]),
    }
    expected = (
        '{"Z":[1,2],"a":true,"id":"7","model_name":"m","model_version":"1","p":5,'
        '"text_output":"hi","é":0.5}'
    )
    assert write(outputs, "7", {"p": 5, "hidden": False}) == expected.encode()


@pytest.mark.parametrize(
    ("shape", "text"),
    [([], b"5"), ([1], b"5"), ([1, 1], b"5"), ([2], b"[5,5]"), ([0], b"[]"), ([1, 0], b"[]")],
)
def test_single_element_has_no_brackets(shape: list[int], text: bytes) -> None:
    values = [5] * int(np.prod(shape, dtype=int))
    assert write({"X": ("INT8", shape, values)}).startswith(b'{"X":' + text + b",")


def test_first_of_several_with_a_name_counts() -> None:
    outputs: Outputs = {"model_name": ("INT8", [1], [5]), "p": ("INT8", [1], [6])}
    assert json.loads(write(outputs, None, {"p": "x", "id": "y"})) == {
        "id": "y",
        "model_name": "m",
        "model_version": "1",
        "p": "x",
    }


def test_output_in_shared_memory_is_left_out() -> None:
    tensors = (
        OutputTensor("A", DATATYPES["INT8"], (1,), None),
        OutputTensor("B", DATATYPES["INT8"], (1,), 1),
    )
    response = InferResponse(InferResponseHead(tensors))
    written = b"".join(write_generate_response(response, [[b"\5"]], JsonPolicies(), {}))
    assert written == b'{"B":5}'


def test_policies_apply() -> None:
    nan: Outputs = {"X": ("FP32", [1], [float("nan")])}
    assert b'"X":NaN' in write(nan)
    assert b'"X":null' in write(nan, policies=JsonPolicies(Nonfinite.NULL))
    blob: Outputs = {"X": ("BYTES", [1], [b"\xff"])}
    with refused_with(ErrorKind.NOT_ACCEPTABLE):
        write(blob)
    base64 = JsonPolicies(bytes_encoding=BytesEncoding.BASE64)
    assert b'"X":"/w=="' in write(blob, policies=base64)
    assert b'"X":"/w=="' in write(blob, policies=JsonPolicies(as_base64=frozenset("X")))


@pytest.mark.parametrize("data", [b"", b"\1\0\0\0ab", struct.pack("<II", 0, 0)])
def test_data_that_do_not_fit_the_shape_are_an_error(data: bytes) -> None:
    tensor = OutputTensor("X", DATATYPES["BYTES"], (1,), len(data))
    with refused_with(ErrorKind.BAD_RESPONSE):
        pieces(tensor, data)


def test_large_output_is_written_in_pieces() -> None:
    values = list(range(100_000))
    tensor = OutputTensor("X", DATATYPES["INT32"], (len(values),), 4 * len(values))
    written = pieces(tensor, raw_data("INT32", values))
    assert json.loads(b"".join(written)) == {"X": values}
    assert max(map(len, written)) < 3 * ENCODE_CHUNK


def test_events_hold_json_in_one_line() -> None:
    assert write_event((b"{", b"}")) == b"data: {}\n\n"
    error = write_generate_error('größer\n"\u2028')
    assert json.loads(error) == {"error": 'größer\n"\u2028'}
    assert b"\n" not in error
