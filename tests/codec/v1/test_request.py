from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json import array_scanner, text_reader
from gateway.codec.policies import BytesEncoding
from gateway.codec.v1 import request as v1_request
from gateway.codec.v1 import values as v1_values
from gateway.codec.v1.request import PredictRequest, PredictRequestConverter
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.v1 import V1Format
from tests.codec import strategies
from tests.codec.reference import RefusedError, pack_bytes
from tests.codec.reference_v1 import Declared, PlainPredict, convert_predict
from tests.codec.strategies_v1 import model, predict_requests

WINDOW = array_scanner.WINDOW
X: Declared = {"x": ("FP32", [-1])}
TEXT: Declared = {"t": ("BYTES", [-1])}
TWO: Declared = {"a": ("FP32", [-1, -1]), "b": ("INT64", [-1])}


@contextmanager
def windows_of(size: int) -> Iterator[None]:
    """Scan text in windows of so many bytes."""
    with ExitStack() as stack:
        stack.enter_context(strategies.windows_of(size))
        for module in (text_reader, v1_values):
            stack.enter_context(mock.patch.object(module, "WINDOW", size))
        stack.enter_context(mock.patch.object(v1_request, "_ROWS_WINDOW", size))
        yield


def convert(
    pieces: list[bytes],
    declared: Declared,
    *,
    batching: bool = False,
    header_cap: int = 10_000,
    depth_cap: int = 64,
) -> PredictRequest:
    codec = PredictRequestConverter(model(declared, batching), header_cap, depth_cap)
    for piece in (*pieces, None):
        codec.feed(piece or b"", last=piece is None)
        while codec.work():
            pass
    return codec.finish("7")


def as_plain(request: PredictRequest, declared: Declared) -> PlainPredict:
    """Return a request as the reference does; checks what every header has."""
    fields = json.loads(request.header)
    assert list(fields) == ["id", "inputs", "parameters"]
    assert fields["id"] == "7"
    parameters = fields["parameters"]
    assert parameters.pop("binary_data_output") is True
    rest = b"".join(request.tensors)
    inputs = {}
    for entry, (name, (datatype, _)) in zip(fields["inputs"], declared.items(), strict=True):
        size = entry["parameters"]["binary_data_size"]
        assert (entry["name"], entry["datatype"]) == (name, datatype)
        inputs[name] = (entry["shape"], rest[:size])
        rest = rest[size:]
    assert not rest
    predicted = request.predicted
    return PlainPredict(inputs, predicted.form.value, predicted.single, parameters)


def outcome(pieces: list[bytes], declared: Declared) -> PlainPredict | str:
    """Return a converted request, or the text of its error."""
    try:
        return as_plain(convert(pieces, declared), declared)
    except GatewayError as error:
        return error.message


def refusal(body: bytes | dict[str, Any], declared: Declared, **caps: Any) -> GatewayError:
    """Return the error of a request; it must be the same however the body is split."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    errors = []
    for pieces in ([text], strategies.bytewise(text), strategies.cut(text, 1)):
        with pytest.raises(GatewayError) as caught:
            convert(pieces, declared, **caps)
        errors.append(caught.value)
    assert len({(error.kind, error.message) for error in errors}) == 1
    return errors[0]


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


# ---------------------------------------------------------------------------- independence of
# splits


@pytest.mark.parametrize("window", [96, WINDOW])
@given(predict_requests(), strategies.SEEDS)
@strategies.LAW
def test_request_equals_the_reference_however_split(
    window: int, made: tuple[bytes, Declared], seed: int
) -> None:
    body, declared = made
    expected = convert_predict(body, declared)
    for pieces in ([body], strategies.bytewise(body), strategies.cut(body, seed)):
        with windows_of(window):
            found = outcome(pieces, declared)
        if window < WINDOW and isinstance(found, str):
            assert "bytes" in found  # a name, a value or the text before a comma is too long
        else:
            assert found == expected


@pytest.mark.parametrize("window", [96, WINDOW])
@given(predict_requests(faulty=True), strategies.SEEDS, st.booleans())
@strategies.LAW
def test_refusals_equal_the_reference_however_split(
    window: int, made: tuple[bytes, Declared], seed: int, mutate: bool
) -> None:
    body, declared = made
    if mutate:
        body = strategies.mutated(body, seed)
    with windows_of(window):
        found = outcome([body], declared)
        for pieces in (strategies.bytewise(body), strategies.cut(body, seed)):
            assert outcome(pieces, declared) == found
    if mutate:
        return
    try:
        expected = convert_predict(body, declared)
    except RefusedError:
        expected = None
    if expected is None or (window < WINDOW and "bytes" in str(found)):
        assert isinstance(found, str)
    else:
        assert found == expected


# ---------------------------------------------------------------------------------- tables

FORMS: dict[str, tuple[dict[str, Any], Declared, list[tuple[list[int], bytes]]]] = {
    "rows": ({"instances": [1, 2.5]}, X, [([2], floats(1, 2.5))]),
    "column": ({"inputs": [1, 2.5]}, X, [([2], floats(1, 2.5))]),
    "named column": ({"inputs": {"x": [1, 2.5]}}, X, [([2], floats(1, 2.5))]),
    "named rows": ({"instances": [{"x": 1}, {"x": 2.5}]}, X, [([2], floats(1, 2.5))]),
    "several inputs": (
        {"instances": [{"a": [1, 2], "b": 7}, {"b": 8, "a": [3, 4]}]},
        TWO,
        [([2, 2], floats(1, 2, 3, 4)), ([2], np.array([7, 8], "<i8").tobytes())],
    ),
    "several columns": (
        {"inputs": {"b": [7], "a": [[1, 2], [3, 4]]}},
        TWO,
        [([2, 2], floats(1, 2, 3, 4)), ([1], np.array([7], "<i8").tobytes())],
    ),
    "an empty column": ({"inputs": []}, X, [([0], b"")]),
    "empty columns": ({"inputs": [[], []]}, {"x": ("FP32", [-1, -1])}, [([2, 0], b"")]),
    "a scalar": ({"inputs": 5}, {"x": ("FP32", [])}, [([], floats(5))]),
    "strings": ({"instances": ["a", "é"]}, TEXT, [([2], pack_bytes([b"a", "é".encode()]))]),
    "base64": ({"instances": [{"b64": "/wA="}]}, TEXT, [([1], pack_bytes([b"\xff\0"]))]),
    "base64 without padding": ({"inputs": [{"b64": "/w"}]}, TEXT, [([1], pack_bytes([b"\xff"]))]),
    "both": ({"inputs": ["a", {"b64": "/w=="}]}, TEXT, [([2], pack_bytes([b"a", b"\xff"]))]),
    "named base64": ({"instances": [{"t": {"b64": "YQ=="}}]}, TEXT, [([1], pack_bytes([b"a"]))]),
    "one in base64": (
        {"inputs": {"b64": "YQ=="}},
        {"t": ("BYTES", [])},
        [([], pack_bytes([b"a"]))],
    ),
    "an input of that name": (
        {"instances": [{"b64": "YQ=="}]},
        {"b64": ("BYTES", [-1])},
        [([1], pack_bytes([b"YQ=="]))],
    ),
}


@pytest.mark.parametrize(("fields", "declared", "expected"), FORMS.values(), ids=FORMS)
def test_each_form_is_converted(
    fields: dict[str, Any], declared: Declared, expected: list[tuple[list[int], bytes]]
) -> None:
    for text in (
        json.dumps(fields),
        json.dumps(fields, indent=1),
        json.dumps({"z": [fields], **fields}),
    ):
        for pieces in ([text.encode()], strategies.bytewise(text.encode())):
            request = as_plain(convert(pieces, declared), declared)
            assert list(request.inputs.values()) == expected
            assert request.form == next(iter(fields))
            assert not request.single


BOTH: Declared = {"t": ("BYTES", [-1]), "u": ("BYTES", [-1])}


@pytest.mark.parametrize(
    ("fields", "declared", "input_encodings"),
    [
        ({"instances": ["a"]}, TEXT, {}),
        ({"instances": [{"b64": "/wA="}]}, TEXT, {0: BytesEncoding.BASE64}),
        ({"inputs": ["a", {"b64": "/w=="}]}, TEXT, {0: BytesEncoding.BASE64}),
        ({"inputs": {"b64": "YQ=="}}, {"t": ("BYTES", [])}, {0: BytesEncoding.BASE64}),
        ({"instances": [{"t": "a", "u": {"b64": "/w=="}}]}, BOTH, {1: BytesEncoding.BASE64}),
        ({"inputs": {"u": ["a"], "t": [{"b64": "/w=="}]}}, BOTH, {0: BytesEncoding.BASE64}),
        ({"instances": [{"b64": "YQ=="}]}, {"b64": ("BYTES", [-1])}, {}),
    ],
)
def test_base64_inputs_are_reported(
    fields: dict[str, Any], declared: Declared, input_encodings: dict[int, BytesEncoding]
) -> None:
    text = json.dumps(fields).encode()
    for pieces in ([text], strategies.bytewise(text)):
        assert convert(pieces, declared).input_encodings == input_encodings


@pytest.mark.parametrize(
    ("declared", "instances", "shape", "single"),
    [
        ([3], [1, 2, 3], [3], False),  # three instances, as the model takes
        ([3], [[1, 2, 3]], [3], True),
        ([1], [5], [1], False),
        ([], [5], [], True),
        ([2, -1], [[[1], [2]]], [2, 1], True),
        ([-1, 3], [[1, 2, 3]], [1, 3], False),
    ],
)
def test_single_instance_for_a_model_without_batching(
    declared: list[int], instances: list[Any], shape: list[int], single: bool
) -> None:
    body = json.dumps({"instances": instances}).encode()
    request = convert([body], {"x": ("FP32", declared)})
    assert json.loads(request.header)["inputs"][0]["shape"] == shape
    assert request.predicted.single is single
    assert request.predicted.form is V1Format.ROWS


def test_parameters_reach_the_model() -> None:
    fields = {"parameters": {"top": 3, "binary_data_output": False}, "inputs": [1], "else": None}
    request = convert([json.dumps(fields).encode()], X)
    assert json.loads(request.header)["parameters"] == {"top": 3, "binary_data_output": True}


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
    "nothing": (b"{}", X, "the request has neither instances nor inputs"),
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
    "no text": (b" ", X, "the request's JSON ends at byte 1, before it is complete"),
    "more behind": (
        b'{"instances":[1]} x',
        X,
        "the request is not valid JSON: expected nothing more at byte 18, near: x",
    ),
    "no comma": (
        b'{"instances":[1] "a":2}',
        X,
        "the request is not valid JSON: expected a comma or the end of the request at byte 17, "
        'near: "a":2}',
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
    "an invalid value": (
        b'{"a":1.,"instances":[1]}',
        X,
        "the request is not valid JSON (no digit after decimal point at byte 7), near: 1.",
    ),
    "no instances": ({"instances": []}, X, "instances is empty: there is nothing to predict"),
    "no array": ({"instances": 5}, X, "instances must be an array, got a number"),
    "an object": ({"instances": {"x": 1}}, X, "instances must be an array, got an object"),
    "a string": (
        {"instances": ["a"]},
        X,
        """input 'x': element 0 ("a") is not a number, as FP32 needs""",
    ),
    "a string alone": (
        {"inputs": "a"},
        X,
        """input 'x': element 0 ("a") is not a number, as FP32 needs""",
    ),
    "a number": (
        {"instances": [1]},
        TEXT,
        "input 't': element 0 (1) is not a string, as BYTES needs",
    ),
    "an object in an array": (
        {"inputs": [1, {"x": 1}]},
        X,
        "input 'x': element 1 is an object, FP32 needs a number",
    ),
    "an object as an element": (
        {"instances": [{"x": {"b64": "YQ=="}}]},
        X,
        "input 'x': element 0 is an object, FP32 needs a number",
    ),
    "too large": ({"instances": [1, 1e40]}, X, "input 'x': element 1 (1e+40) does not fit FP32"),
    "too large in an object": (
        {"instances": [{"x": 1}, {"x": 1e40}]},
        X,
        "input 'x': element 1 (1e+40) does not fit FP32",
    ),
    "too large for 64 bits, in an object": (
        b'{"instances":[{"x":1},{"x":99999999999999999999}]}',
        {"x": ("INT64", [-1])},
        "input 'x': element 1 (99999999999999999999) does not fit INT64",
    ),
    "a V2 request": ({"inputs": [{"name": "x", "data": [1]}]}, X, OF_V2),
    "a V2 request for BYTES": (b' { "inputs" :\n [ {\n "shape" :[1],"name":"t"}]}', TEXT, OF_V2),
    "a V2 request for several inputs": ({"inputs": [{"datatype": "FP32"}]}, TWO, OF_V2),
    "objects that are no tensors": (
        {"inputs": [{"x": 1}]},
        X,
        "input 'x': element 0 is an object, FP32 needs a number",
    ),
    "null for an array": ({"instances": None}, X, "instances must be an array, got null"),
    "a string for an array": ({"instances": "a"}, X, "instances must be an array, got a string"),
    "null for inputs": (
        {"inputs": None},
        X,
        "input 'x': element 0 (null) is not a number, as FP32 needs",
    ),
    "ragged": (
        {"instances": [[1, 2], [3]]},
        {"x": ("FP32", [-1, -1])},
        "input 'x' is no tensor, as its arrays are ragged: "
        "at depth 2, array number 1 has 1 items, those before it 2",
    ),
    "ragged objects": (
        {"instances": [{"a": [1], "b": 1}, {"a": [1, 2], "b": 1}]},
        TWO,
        "input 'a' is no tensor, as its arrays are ragged: "
        "at depth 2, array number 1 has 2 items, those before it 1",
    ),
    "another depth": (
        {"instances": [[1], 2]},
        {"x": ("FP32", [-1, -1])},
        "input 'x' is no tensor, as its arrays are ragged: values stand beside arrays",
    ),
    "a dimension more": (
        {"instances": [[1]]},
        X,
        NOT_TAKEN + "[-1]; the instances have shape [1, 1]",
    ),
    "a dimension less": (
        {"inputs": 1},
        X,
        NOT_TAKEN + "[-1]; the inputs have shape []",
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
    "an unnamed column": (
        {"inputs": [1]},
        TWO,
        "inputs must be an object that names the inputs: model 'm' takes a, b",
    ),
    "a name that is none": (
        {"inputs": {"a": [[1]], "c": 1}},
        TWO,
        "inputs names 'c', but the model takes a, b",
    ),
    "a name that is none, in an instance": (
        {"instances": [{"a": [1], "b": 1}, {"a": [1], "c": 1}]},
        TWO,
        "instances[1] names 'c', but the model takes a, b",
    ),
    "a name that lacks": ({"inputs": {"b": [1]}}, TWO, "inputs lacks 'a'; the model takes a, b"),
    "a name that lacks, in an instance": (
        {"instances": [{"a": [1], "b": 1}, {}]},
        TWO,
        "instances[1] lacks 'a'; the model takes a, b",
    ),
    "a name twice": (b'{"inputs":{"x":[1],"x":[2]}}', X, "inputs names 'x' twice"),
    "a name twice, in an instance": (
        b'{"instances":[{"x":[1]},{"x":[1],"x":[2]}]}',
        X,
        "instances[1] names 'x' twice",
    ),
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
    "base64 twice in an instance": (
        b'{"instances":[{"t":"::"},{"t":{"b64":"QQ==","b64":"QQ=="}}]}',
        TEXT,
        """input 't': element 1 must be a string or {"b64": "..."}, as BYTES needs""",
    ),
    "no object any more": (
        {"instances": [{"x": 1}, 2]},
        X,
        "instances[1] must be an object, as those before it are",
    ),
    "another signature": (
        {"signature_name": "classify", "inputs": [1]},
        X,
        'signature_name is "classify": models are served with one signature here; leave it out, '
        'or say "serving_default"',
    ),
    "parameters": (
        {"parameters": [1], "inputs": [1]},
        X,
        "parameters must be an object, got an array",
    ),
    "no base64": (
        {"instances": [{"b64": "YQ==YQ=="}]},
        TEXT,
        "input 't': element 0 is not base64 (Excess data after padding)",
    ),
    "an object that is no base64": (
        {"instances": [{"t": {"b65": "YQ=="}}]},
        TEXT,
        """input 't': element 0 must be a string or {"b64": "..."}, as BYTES needs""",
    ),
    "base64 and more": (
        {"inputs": ["a", {"b64": "YQ==", "x": 1}]},
        TEXT,
        """input 't': element 1 must be a string or {"b64": "..."}, as BYTES needs""",
    ),
    "base64 that is no string": (
        {"inputs": [{"b64": 1}]},
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
    assert "limits.header_bytes" in error.message


# ---------------------------------------------------------------------------------- large ones

LARGE: dict[str, Callable[[], tuple[dict[str, Any], Declared]]] = {
    "numbers": lambda: (
        {"instances": np.arange(30_000).reshape(100, 3, 100).tolist()},
        {"x": ("INT32", [-1, 3, 100])},
    ),
    "small objects": lambda: (
        {"instances": [{"a": [i / 7, i], "b": i} for i in range(20_000)]},
        TWO,
    ),
    "large objects": lambda: (
        {"instances": [{"a": [i / 7 for i in range(20_000)], "b": n} for n in range(3)]},
        TWO,
    ),
    "objects with NaN": lambda: (
        {"instances": [{"x": float("nan") if i % 7 else i / 3} for i in range(9000)]},
        X,
    ),
    "long strings": lambda: ({"instances": ["é\\" * 50_000, "", "b" * 99_999]}, TEXT),
    "long strings in objects": lambda: (
        {"instances": [{"t": "é\\" * 50_000}, {"t": ""}, {"t": '"' * 99_999}]},
        TEXT,
    ),
    "long base64": lambda: (
        {
            "instances": [
                {"b64": base64.b64encode(bytes(range(250)) * n).decode()} for n in (900, 1)
            ]
        },
        TEXT,
    ),
    "many in base64": lambda: (
        {"inputs": {"t": [{"b64": "aGVsbG8="}] * 9000}},
        TEXT,
    ),
    "much beside it": lambda: (
        {**{f"k{i}": list(range(99)) for i in range(60)}, "other": ["]" * 90_000], "inputs": [1]},
        X,
    ),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_values_larger_than_a_window_are_converted(
    make: Callable[[], tuple[dict[str, Any], Declared]],
) -> None:
    fields, declared = make()
    body = json.dumps(fields).encode()
    expected = convert_predict(body, declared)
    for pieces in (
        [body],
        strategies.cut(body, 3),
        [body[i : i + 999] for i in range(0, len(body), 999)],
    ):
        request = convert(pieces, declared, header_cap=200_000)
        np.testing.assert_equal(as_plain(request, declared), expected)


@pytest.mark.parametrize("value", ["b", {"b64": "Yg=="}])
def test_many_small_elements_become_few_chunks(value: Any) -> None:
    # The first element has all others read one by one.
    body = json.dumps({"inputs": [{"b64": "YQ=="}, *[value] * 9000]}).encode()
    request = convert([body], TEXT)
    assert b"".join(request.tensors) == pack_bytes([b"a", *[b"b"] * 9000])
    assert len(request.tensors) < 1100


def test_conversion_pauses_between_time_slices() -> None:
    """No step is larger than a window, however much text is available at once."""
    fields, declared = LARGE["small objects"]()
    body = json.dumps(fields).encode()
    codec = PredictRequestConverter(model(declared), 1000, 64)
    codec.feed(body, last=True)
    shares = 1
    while codec.work():
        shares += 1
    assert shares >= len(body) / v1_request._ROWS_WINDOW
    assert 0 < codec.held - 20_000 * (8 + 8) < 20_000


def test_conversion_of_tiny_strings_pauses_between_time_slices() -> None:
    body = json.dumps({"inputs": [""] * 100_000}).encode()
    codec = PredictRequestConverter(model(TEXT), 1000, 64)
    codec.feed(body, last=True)
    shares = 1
    while codec.work():
        shares += 1
    assert shares >= len(body) / array_scanner.STRING_WINDOW
    assert 0 < codec.held - 100_000 * 4 < 20_000


def test_preferred_read_size_fills_a_window() -> None:
    codec = PredictRequestConverter(model(X), 1000, 64)
    assert codec.preferred_read_size == WINDOW
    begin, numbers = b'{"instances":', b"[" + b"1," * 100
    codec.feed(begin + numbers)
    codec.work()
    assert codec.preferred_read_size + len(numbers) == WINDOW


def test_more_members_than_the_cap_are_refused() -> None:
    def body(count: int) -> bytes:
        return json.dumps({"instances": [1], **{f"k{i}": i for i in range(count - 1)}}).encode()

    assert convert([body(64)], X)
    with pytest.raises(GatewayError) as caught:
        convert([body(65)], X)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.message == "the request has more than 64 members"


@pytest.mark.parametrize(
    "element", ['"{"', '{"b64":"QQ"}', '"a",{"b64":"QQ"}', '["a"],[{"b64":""}]']
)
def test_elements_are_converted_together(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = mock.Mock(wraps=v1_values._read_element)
    monkeypatch.setattr(v1_values, "_read_element", read)
    count = 9000
    body = '{"inputs":[' + ",".join([element] * count) + "]}"
    shape = [-1, -1] if element.startswith("[") else [-1]
    request = convert([body.encode()], {"t": ("BYTES", shape)})
    assert as_plain(request, {"t": ("BYTES", shape)})
    assert read.call_count < 9


@pytest.mark.parametrize("fault", ['{"x":"a"}', '{"y":1}', "1", '{"x":[[1]]}'])
def test_few_instances_before_an_invalid_one_are_read_one_by_one(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = mock.Mock(wraps=v1_values.read_members)
    monkeypatch.setattr(v1_request, "read_members", read)
    for before in (1, 7, 8, 9, 1000, 3000):
        read.reset_mock()
        body = '{"instances":[' + '{"x":1},' * before + fault + "," + '{"x":1},' * 999
        with pytest.raises(GatewayError) as caught:
            convert([body.encode()], X, depth_cap=1)
        number = f"[{before}]" if "x" not in fault else f"element {before}"
        assert number in caught.value.message or "deeper than 1" in caught.value.message
        assert read.call_count < 20


def test_too_deep_instances_are_refused_beside_shallow_ones() -> None:
    row, deep = '{"x":[1]},', '{"x":[[1]]},'
    body = '{"instances":[' + row * 20 + deep + row * 20 + '{"x":"a"}]}'
    with pytest.raises(GatewayError, match="nested deeper than 1"):
        convert([body.encode()], {"x": ("FP32", [-1, -1])}, depth_cap=1)
