from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json import text_reader
from gateway.codec.v1 import nested_reader as v1_values
from gateway.codec.v1 import request as v1_request
from gateway.codec.v1.buffered_request import read_prediction_fast
from gateway.codec.v1.request import PredictRequestReader
from gateway.errors import ErrorKind, GatewayError
from tests.codec import strategies
from tests.codec.reference import RefusedError, pack_bytes
from tests.codec.reference_v1 import Declared, PlainPredict, convert_predict
from tests.codec.strategies_v1 import model, predict_requests
from tests.codec.v1.predict_requests import TEXT, TWO, WINDOW, X, as_plain, convert, refusal
from tests.support.checks.refused import refused


@contextmanager
def windows_of(size: int) -> Iterator[None]:
    """Scan text in windows of so many bytes."""
    with ExitStack() as stack:
        stack.enter_context(strategies.windows_of(size))
        for module in (text_reader, v1_values):
            stack.enter_context(mock.patch.object(module, "WINDOW", size))
        stack.enter_context(mock.patch.object(v1_request, "ROWS_WINDOW", size))
        yield


def outcome(pieces: list[bytes], declared: Declared) -> PlainPredict | str:
    """Return a converted request, or the text of its error."""
    try:
        return as_plain(convert(pieces, declared), declared)
    except GatewayError as error:
        return error.message


# ----------------------------------------------------------------------- independence of splits


WINDOWS = (96, WINDOW)


@given(predict_requests(), strategies.SEEDS)
@strategies.LAW
def test_request_equals_the_reference_however_split(
    made: tuple[bytes, Declared], seed: int
) -> None:
    body, declared = made
    expected = convert_predict(body, declared)
    ways = ([body], strategies.bytewise(body), strategies.cut(body, seed))
    for window, pieces in product(WINDOWS, ways):
        with windows_of(window):
            found = outcome(pieces, declared)
        if window < WINDOW and isinstance(found, str):
            # Too long for the window: a name, a value, the text before a comma, or an array of
            # strings before its first object.
            assert "bytes" in found or "is an object" in found
        else:
            assert found == expected


@given(predict_requests(faulty=True), strategies.SEEDS, st.booleans())
@strategies.LAW
def test_refusals_equal_the_reference_however_split(
    made: tuple[bytes, Declared], seed: int, mutate: bool
) -> None:
    body, declared = made
    expected = None
    if mutate:
        body = strategies.mutated(body, seed)
    else:
        with suppress(RefusedError):
            expected = convert_predict(body, declared)
    for window in WINDOWS:
        with windows_of(window):
            found = outcome([body], declared)
            for pieces in (strategies.bytewise(body), strategies.cut(body, seed)):
                assert outcome(pieces, declared) == found
        if expected is not None and not (window < WINDOW and "bytes" in str(found)):
            assert found == expected
        elif not mutate:
            assert isinstance(found, str)


BASE64 = [base64.b64encode(bytes(range(250)) * count).decode() for count in (900, 1)]
LARGE: dict[str, tuple[dict[str, Any], Declared]] = {
    "numbers": (
        {"instances": np.arange(15_000).reshape(50, 3, 100).tolist()},
        {"x": ("INT32", [-1, 3, 100])},
    ),
    "small objects": ({"instances": [{"a": [i / 7, i], "b": i} for i in range(9_000)]}, TWO),
    "large objects": (
        {"instances": [{"a": [i / 7 for i in range(20_000)], "b": n} for n in range(3)]},
        TWO,
    ),
    "objects with NaN": (
        {"instances": [{"x": float("nan") if i % 7 else i / 3} for i in range(9000)]},
        X,
    ),
    "long strings": ({"instances": ["é\\" * 50_000, "", "b" * 99_999]}, TEXT),
    "long strings in objects": (
        {"instances": [{"t": "é\\" * 50_000}, {"t": ""}, {"t": '"' * 99_999}]},
        TEXT,
    ),
    "long base64": ({"instances": [{"b64": text} for text in BASE64]}, TEXT),
    "many in base64": ({"inputs": {"t": [{"b64": "aGVsbG8="}] * 9000}}, TEXT),
    "much beside it": (
        {**{f"k{i}": list(range(99)) for i in range(60)}, "other": ["]" * 90_000], "inputs": [1]},
        X,
    ),
}


@pytest.mark.parametrize(("fields", "declared"), LARGE.values(), ids=LARGE)
def test_values_larger_than_a_window_are_converted(
    fields: dict[str, Any], declared: Declared
) -> None:
    body = json.dumps(fields).encode()
    expected = convert_predict(body, declared)
    for pieces in ([body], [body[i : i + 4999] for i in range(0, len(body), 4999)]):
        request = convert(pieces, declared, header_cap=200_000)
        np.testing.assert_equal(as_plain(request, declared), expected)


@pytest.mark.parametrize("value", ["b", {"b64": "Yg=="}])
def test_many_small_elements_become_few_chunks(value: Any) -> None:
    # The first element has all others read one by one.
    body = json.dumps({"inputs": [{"b64": "YQ=="}, *[value] * 9000]}).encode()
    request, _ = convert([body], TEXT)
    assert b"".join(request.chunks) == pack_bytes([b"a", *[b"b"] * 9000])
    assert len(request.chunks) < 1100


def test_conversion_pauses_between_time_slices() -> None:
    """No step is larger than a window, however much text is available at once."""
    fields, declared = LARGE["small objects"]
    body = json.dumps(fields).encode()
    codec = PredictRequestReader(model(declared), 1000, 64)
    codec.feed(body, last=True)
    shares = 1
    while codec.step():
        shares += 1
    assert shares >= len(body) / v1_request.ROWS_WINDOW
    assert 0 < codec.buffered_bytes - 9_000 * (8 + 8) < 20_000


def test_more_members_than_the_cap_are_refused() -> None:
    def body(count: int) -> bytes:
        return json.dumps({"instances": [1], **{f"k{i}": i for i in range(count - 1)}}).encode()

    assert convert([body(64)], X)
    with refused(ErrorKind.BAD_REQUEST, "the request has more than 64 members"):
        convert([body(65)], X)


@pytest.mark.parametrize(
    "element", ['"{"', '{"b64":"QQ"}', '"a",{"b64":"QQ"}', '["a"],[{"b64":""}]']
)
def test_elements_are_converted_together(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = mock.Mock(wraps=v1_values.read_element)
    monkeypatch.setattr(v1_values, "read_element", read)
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


def fast_result(body: bytes, declared: Declared, depth_cap: int = 64) -> PlainPredict | None:
    request = read_prediction_fast(body, model(declared), depth_cap, "7")
    return None if request is None else as_plain(request, declared)


def fast_path_agrees(body: bytes, declared: Declared) -> bool:
    """Tell whether the fast path agrees with the streaming path, or leaves the request to it."""
    found = fast_result(body, declared)
    return found is None or found == outcome([body], declared)


@pytest.mark.parametrize("form", ["instances", "inputs"])
@pytest.mark.parametrize(
    ("declared", "data"),
    [
        (X, [1, -0.5, 1e-3]),
        (X, [0.1] * 1000),
        ({"x": ("INT64", [-1, 2])}, [[1, 2], [3, -4]]),
        ({"x": ("UINT8", [-1, 1, 2])}, [[[1, 255]]]),
        ({"x": ("FP64", [2])}, [[0.25, 1]]),
        ({"x": ("BF16", [-1])}, [float("inf"), 257, float("nan")]),
        ({"x": ("BOOL", [-1, 1])}, [[True], [False]]),
    ],
)
def test_fast_path_reads_numbers(declared: Declared, data: Any, form: str) -> None:
    for indent in (None, 1):
        body = json.dumps({form: data}, indent=indent).encode()
        assert fast_path_agrees(body, declared)
        if form == "instances":
            assert fast_result(body, declared) is not None


@pytest.mark.parametrize(
    ("declared", "body"),
    [
        (X, b""),
        (X, b'{"instances":[]}'),
        (X, b'{"instances":[[1],2]}'),
        (X, b'{"instances":' + b"[" * 999 + b"1" + b"]" * 999 + b"}"),
        (X, b'{"instances":[1,true]}'),
        (X, b'{"instances":[1,]}'),
        (X, b'{"instances":[1]'),
        (X, b'{"instances":[1],"inputs":[1]}'),
        (X, b'{"parameters":{},"instances":[1]}'),
        ({"x": ("UINT8", [-1])}, b'{"instances":[256]}'),
        ({"x": ("BOOL", [-1])}, b'{"instances":[1]}'),
        (TEXT, b'{"instances":["a"]}'),
        (TWO, b'{"instances":[1]}'),
    ],
)
def test_fast_path_leaves_unusual_requests(declared: Declared, body: bytes) -> None:
    assert fast_result(body, declared) is None


def test_fast_path_respects_the_depth_cap() -> None:
    body, declared = b'{"instances":[[[1]]]}', {"x": ("FP32", [-1, 1, 1])}
    assert fast_result(body, declared, 4) is not None
    assert fast_result(body, declared, 3) is None


@strategies.LAW
@given(predict_requests(), strategies.SEEDS)
def test_fast_path_agrees_with_the_streaming_path_on_any_request(
    made: tuple[bytes, Declared], seed: int
) -> None:
    body, declared = made
    assert fast_path_agrees(body, declared)
    assert fast_path_agrees(strategies.mutated(body, seed), declared)


def test_preferred_read_size_fills_a_window() -> None:
    codec = PredictRequestReader(model(X), 1000, 64)
    assert codec.preferred_read_size == WINDOW
    begin, numbers = b'{"instances":', b"[" + b"1," * 100
    codec.feed(begin + numbers)
    codec.step()
    assert codec.preferred_read_size + len(numbers) == WINDOW


# --------------------------------------------------------------------------------- refusals

BOTH: Declared = {"t": ("BYTES", [-1]), "u": ("BYTES", [-1])}


@pytest.mark.parametrize(
    ("fields", "declared", "base64"),
    [
        ({"instances": ["a"]}, TEXT, [None]),
        ({"inputs": ["a", {"b64": "/w=="}]}, TEXT, [True]),
        ({"instances": [{"t": "a", "u": {"b64": "/w=="}}]}, BOTH, [None, True]),
        ({"instances": [{"b64": "YQ=="}]}, {"b64": ("BYTES", [-1])}, [None]),
    ],
)
def test_base64_inputs_are_reported(
    fields: dict[str, Any], declared: Declared, base64: list[bool | None]
) -> None:
    text = json.dumps(fields).encode()
    for pieces in ([text], strategies.bytewise(text)):
        request, _ = convert(pieces, declared)
        assert [each.base64 for each in request.head.inputs] == base64


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
