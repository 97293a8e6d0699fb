"""Members of a request to generate become inputs as the model's metadata says, or parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.generate.request import (
    MAX_OUTSIDE_STRINGS,
    GenerateBodyCheck,
    GenerateRequest,
    read_generate_request,
)
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.tensors import ModelMetadata, TensorSpec

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
    with pytest.raises(GatewayError) as failure:
        read(body)
    assert failure.value.kind is ErrorKind.BAD_REQUEST
    assert text in failure.value.message


def test_input_that_no_member_can_name_is_told() -> None:
    with pytest.raises(GatewayError, match="input 'parameters'"):
        read({"parameters": {}}, model(parameters=("BYTES", [1])))
    assert inputs(read({}, model(parameters=("BYTES", [1])))) == []


def test_only_texts_may_be_large() -> None:
    size = 4 * MAX_OUTSIDE_STRINGS
    for filling in (b"a", b'\\"', b"\\\\", b"[", b"\\n,"):
        body = b'{"text": "' + filling * (size // len(filling)) + b'"}'
        assert inputs(read(body))[0]["shape"] == [1]
    with pytest.raises(GatewayError) as failure:
        read(b'{"text": [' + b"1," * (MAX_OUTSIDE_STRINGS // 2) + b"1]}")
    assert failure.value.kind is ErrorKind.TOO_LARGE


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
    request = _read_or_refuse(body)
    if request is None:
        return
    nested = members.get("parameters", {})
    every = {**{k: v for k, v in members.items() if k != "parameters"}, **nested}
    found = {tensor["name"]: tensor["data"] for tensor in inputs(request)}
    names = {"text", "stop"}
    expected = {k: v if isinstance(v, list) else [v] for k, v in every.items() if k in names}
    assert repr(found) == repr({name: expected[name] for name in found})
    assert set(found) == set(expected)
    assert set(request.parameters) == set(every) - names


def _read_or_refuse(body: bytes) -> GenerateRequest | None:
    refused = None
    try:
        return read(body)
    except GatewayError as error:
        refused = error.kind
    assert refused is ErrorKind.BAD_REQUEST
    return None
