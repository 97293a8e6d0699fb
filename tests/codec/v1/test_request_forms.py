from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import ErrorKind
from tests.codec import strategies
from tests.codec.reference_v1 import Declared
from tests.codec.v1.predict_requests import TEXT, TWO, X, convert, refusal

# --------------------------------------------------------------------------------------- tables


BOTH: Declared = {"t": ("BYTES", [-1]), "u": ("BYTES", [-1])}


@pytest.mark.parametrize(
    ("fields", "declared", "base64"),
    [
        ({"instances": ["a"]}, TEXT, set()),
        ({"inputs": ["a", {"b64": "/w=="}]}, TEXT, {0}),
        ({"instances": [{"t": "a", "u": {"b64": "/w=="}}]}, BOTH, {1}),
        ({"instances": [{"b64": "YQ=="}]}, {"b64": ("BYTES", [-1])}, set()),
    ],
)
def test_base64_inputs_are_reported(
    fields: dict[str, Any], declared: Declared, base64: set[int]
) -> None:
    text = json.dumps(fields).encode()
    for pieces in ([text], strategies.bytewise(text)):
        request, _ = convert(pieces, declared)
        found = {i for i, tensor in enumerate(request.head.inputs) if tensor.base64}
        assert found == base64


def test_parameters_reach_the_model() -> None:
    fields = {"parameters": {"top": 3, "binary_data_output": False}, "inputs": [1], "else": None}
    request, _ = convert([json.dumps(fields).encode()], X)
    assert request.head.parameters == {"top": 3}


OF_V2 = (
    "inputs is an array of tensors, as in the V2 protocol: "
    "send such a request to /v2/models/MODEL/infer"
)

NOT_TAKEN = "input 'x' of model 'm' takes shape "

REFUSED: dict[str, tuple[bytes | dict[str, Any], Declared, str]] = {
    "no object": (
        b"[1]",
        X,
        "the request must be a JSON object with instances or inputs, got an array",
    ),
    "neither": ({"data": [1]}, X, "the request has neither instances nor inputs"),
    "both": (
        {"inputs": [1], "instances": [1]},
        X,
        "the request must have either instances or inputs, and once",
    ),
    "broken off": (
        b'{"instances":[1,2',
        X,
        "the request's JSON ends at byte 17, before it is complete",
    ),
    "more behind": (
        b'{"instances":[1]} x',
        X,
        "the request is not valid JSON: expected the end of the request at byte 18, near: x",
    ),
    "no name": (
        b"{instances:[1]}",
        X,
        "the request is not valid JSON: expected a name in double quotes at byte 1, "
        "near: instances:[1]}",
    ),
    "an invalid name": (
        b'{"\\x":1}',
        X,
        'the request is not valid JSON (invalid escaped sequence in string at byte 2), near: "\\x"',
    ),
    "no instances": ({"instances": []}, X, "instances is empty: there is nothing to predict"),
    "no array": ({"instances": 5}, X, "instances must be an array, got a number"),
    "an object in an array": (
        {"inputs": [1, {"x": 1}]},
        X,
        "input 'x': element 1 is an object, FP32 needs a number",
    ),
    "too large": ({"instances": [1, 1e40]}, X, "input 'x': element 1 (1e+40) does not fit FP32"),
    "a boolean among integers": (
        {"instances": [{"x": 1}, {"x": True}]},
        {"x": ("INT8", [-1])},
        "input 'x': element 1 (true) is not an integer, as INT8 needs",
    ),
    "too large for 64 bits, in an object": (
        b'{"instances":[{"x":1},{"x":99999999999999999999}]}',
        {"x": ("INT64", [-1])},
        "input 'x': element 1 (99999999999999999999) does not fit INT64",
    ),
    "a V2 request": ({"inputs": [{"name": "x", "data": [1]}]}, X, OF_V2),
    "ragged": (
        {"instances": [[1, 2], [3]]},
        {"x": ("FP32", [-1, -1])},
        "input 'x' is no tensor, as its arrays are ragged: "
        "at depth 2, array number 1 has 1 items, those before it 2",
    ),
    "a dimension more": (
        {"instances": [[1]]},
        X,
        NOT_TAKEN + "[-1]; the instances have shape [1, 1]",
    ),
    "another size": (
        {"inputs": {"x": [[1, 2]]}},
        {"x": ("FP32", [-1, 3])},
        NOT_TAKEN + "[-1, 3]; the inputs have shape [1, 2]",
    ),
    "several for a model that takes one": (
        {"instances": [[1, 2, 3], [4, 5, 6]]},
        {"x": ("FP32", [3])},
        NOT_TAKEN + "[3], one instance at a time; the instances have shape [2, 3]",
    ),
    "unnamed": (
        {"instances": [1]},
        TWO,
        "each of the instances must be an object that names the inputs: model 'm' takes a, b",
    ),
    "a name that is none, in an instance": (
        {"instances": [{"a": [1], "b": 1}, {"a": [1], "c": 1}]},
        TWO,
        "instances[1] names 'c', but the model takes a, b",
    ),
    "a name that lacks": ({"inputs": {"b": [1]}}, TWO, "inputs lacks 'a'; the model takes a, b"),
    "a name twice": (b'{"inputs":{"x":[1],"x":[2]}}', X, "inputs names 'x' twice"),
    "a name twice, in one instance of many": (
        b'{"instances":[' + b'{"x":[1]},' * 5000 + rb'{"x":[1],"\u0078":[2]},{"x":[1]}]}',
        X,
        "instances[5000] names 'x' twice",
    ),
    "base64 twice in an element": (
        b'{"instances":["{:",' + b'{"b64":"QQ=="},' * 99 + b'{"b64":"QQ==","b64":"QQ=="}]}',
        TEXT,
        """input 't': element 100 must be a string or {"b64": "..."}, as BYTES needs""",
    ),
    "no object any more": (
        {"instances": [{"x": 1}, 2]},
        X,
        "instances[1] must be an object, as those before it are",
    ),
    "no base64": (
        {"instances": [{"b64": "YQ==YQ=="}]},
        TEXT,
        "input 't': element 0 is not base64 (Excess data after padding)",
    ),
    "base64 that is no string": (
        {"inputs": [{"b64": 1}]},
        TEXT,
        """input 't': element 0 must be a string or {"b64": "..."}, as BYTES needs""",
    ),
    "no comma": (
        b'{"instances":[1] "a":2}',
        X,
        "the request is not valid JSON: expected a comma or the end of the request at byte 17, "
        'near: "a":2}',
    ),
    "an invalid value": (
        b'{"a":1.,"instances":[1]}',
        X,
        "the request is not valid JSON (no digit after decimal point at byte 7), near: 1.",
    ),
    "an unnamed column": (
        {"inputs": [1]},
        TWO,
        "inputs must be an object that names the inputs: model 'm' takes a, b",
    ),
    "an object as an element": (
        {"instances": [{"x": {"b64": "YQ=="}}]},
        X,
        "input 'x': element 0 is an object, FP32 needs a number",
    ),
    "a name that lacks, in an instance": (
        {"instances": [{"a": [1], "b": 1}, {}]},
        TWO,
        "instances[1] lacks 'a'; the model takes a, b",
    ),
    "an object that is no base64": (
        {"instances": [{"t": {"b65": "YQ=="}}]},
        TEXT,
        """input 't': element 0 must be a string or {"b64": "..."}, as BYTES needs""",
    ),
}


@pytest.mark.parametrize(("body", "declared", "message"), REFUSED.values(), ids=REFUSED)
def test_errors_name_the_invalid_part(
    body: bytes | dict[str, Any], declared: Declared, message: str
) -> None:
    error = refusal(body, declared)
    assert (error.kind, error.message) == (ErrorKind.BAD_REQUEST, message)


def test_batching_model_refuses_an_instance_without_its_dimension() -> None:
    error = refusal({"instances": [[[1, 2]]]}, {"x": ("FP32", [4, 2])}, batching=True)
    assert error.message == NOT_TAKEN + "[4, 2]; the instances have shape [1, 1, 2]"


@pytest.mark.parametrize(
    ("declared", "fields"),
    [
        (X, {"instances": [[[[1]]]]}),
        (X, {"instances": [{"x": [[[1]]]}]}),
        (TEXT, {"inputs": [[[[{"b64": ""}]]]]}),
        (X, {"other": [[[{"x": 1}]]], "inputs": [1]}),
    ],
)
def test_depth_cap_applies(declared: Declared, fields: dict[str, Any]) -> None:
    error = refusal(fields, declared, depth_cap=2)
    assert error.kind is ErrorKind.BAD_REQUEST
    assert "nested deeper than 2" in error.message


def test_header_cap_applies_to_other_members() -> None:
    error = refusal({"other": ["x" * 50] * 50, "inputs": [1]}, X, header_cap=1000)
    assert error.kind is ErrorKind.TOO_LARGE
    assert "limits.max_inference_header_bytes" in error.message
