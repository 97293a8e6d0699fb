from __future__ import annotations

import json
import math
import random
import struct
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.codec.v1.prediction_form import write_prediction_fast
from gateway.codec.v1.response import predict_converter
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.v1 import V1Format, V1ResponseLayout
from tests.codec import strategies
from tests.codec.reference import DTYPES, pack_bytes
from tests.codec.reference_v1 import predictions
from tests.codec.strategies import Output, output, response_body
from tests.codec.v1.predict_responses import convert, floats, some_output, texts
from tests.support.checks.refused import refused_with

BAD, UNFIT = ErrorKind.BAD_RESPONSE, ErrorKind.NOT_ACCEPTABLE
NAN_AT_END = np.array([1, math.nan], "<f4").tobytes()
ROWS, COLUMNS = V1ResponseLayout(V1Format.ROWS), V1ResponseLayout(V1Format.COLUMNS)


def response_to(predicted: V1ResponseLayout, *outputs: Output, **options: Any) -> Any:
    body, size = response_body(list(outputs))
    return json.loads(convert([body], size, predicted, **options))


def check_refused(
    kind: ErrorKind, text: str, predicted: V1ResponseLayout, *outputs: Output, **options: Any
) -> None:
    with refused_with(kind, text):
        response_to(predicted, *outputs, **options)


@given(strategies.SEEDS)
@strategies.LAW
def test_response_equals_the_reference_however_split(seed: int) -> None:
    rng = random.Random(seed)
    single = rng.random() < 0.2
    predicted = (
        V1ResponseLayout(V1Format.ROWS, single=True) if single else rng.choice([ROWS, COLUMNS])
    )
    rows = rng.randrange(4)
    outputs = []
    for name in rng.sample(["a", "b", "c_bytes", "é"], k=rng.randint(1, 3)):
        shape = rng.choices([1, 2, 3, 0], [4, 4, 4, 1], k=rng.randrange(3))
        scalar = single or (predicted is COLUMNS and rng.random() < 0.3)
        outputs.append(some_output(rng, name, shape if scalar else [rows, *shape]))
    body, size = response_body(outputs)
    expected = predictions(body, size, predicted.form.value, single)
    for pieces in ([body], strategies.bytewise(body), strategies.cut(body, seed)):
        assert json.loads(convert(pieces, size, predicted)) == expected


@pytest.mark.parametrize("bytes_encoding", BytesEncoding)
def test_bytes_follow_the_policy_and_the_output_name(bytes_encoding: BytesEncoding) -> None:
    outputs = texts("image_bytes", b"\xff"), texts("text", b"a")
    text = {"b64": "YQ=="} if bytes_encoding is BytesEncoding.BASE64 else "a"
    row = {"image_bytes": {"b64": "/w=="}, "text": text}
    assert response_to(ROWS, *outputs, bytes_encoding=bytes_encoding) == {"predictions": [row]}
    columns = {name: [value] for name, value in row.items()}
    assert response_to(COLUMNS, *outputs, bytes_encoding=bytes_encoding) == {"outputs": columns}


@pytest.mark.parametrize("predicted", [ROWS, COLUMNS])
def test_large_rows_of_several_outputs_are_written_in_pieces(predicted: V1ResponseLayout) -> None:
    outputs = [
        floats("large", 3, 50, 400),
        floats("small", 3, 2),
        texts("text", "é\\".encode() * 50_000, b"", b"x" * 90_000),
        floats("none", 3, 0),
    ]
    body, size = response_body(outputs)
    expected = predictions(body, size, predicted.form.value, single=False)
    pieces = [body[i : i + 32768] for i in range(0, len(body), 32768)]
    assert json.loads(convert(pieces, size, predicted)) == expected


def test_single_output_is_written_as_it_arrives() -> None:
    body, size = response_body([floats("y", 2, 2)])
    codec = predict_converter(size, ROWS, JsonPolicies(), 1 << 24, 0)
    assert codec.text(body[:size]) == b'{"predictions":'
    assert codec.text(body[size : size + 8]) == b"[[0.0,1.0]"
    assert codec.text(body[size + 8 :]) == b",[2.0,3.0]]"
    assert codec.buffered_bytes < 2000  # the header
    assert b"".join(codec.finish()) == b"}"


def test_rows_of_several_outputs_are_buffered_up_to_the_cap() -> None:
    outputs = floats("y", 100), texts("z", *[b""] * 100)
    assert response_to(ROWS, *outputs, body_cap=2000)
    check_refused(BAD, "limits.max_buffered_body_bytes", ROWS, *outputs, body_cap=1000)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([floats("y")], "output 'y' has shape [], which has no rows"),
        (
            [floats("y", 2), floats("z", 3)],
            "output 'y' has 2 rows and output 'z' 3, which have no rows in common",
        ),
    ],
)
def test_outputs_without_rows_in_common_are_refused(outputs: list[Output], message: str) -> None:
    advice = "; send the request with inputs instead of instances"
    check_refused(UNFIT, message + advice, ROWS, *outputs)
    assert response_to(COLUMNS, *outputs)


NO_TEXT = texts("y", *[b"a"] * 9, b"\xff")
NO_TEXT_ADVICE = (
    "output 'y': element 9 is not UTF-8 text, which JSON needs; have the output's name end in "
    "_bytes, or set the policy bytes: base64"
)
NAN = output("y", "FP32", [10], np.array([0] * 9 + [math.nan], "<f4").tobytes())
NAN_ADVICE = "is nan, which JSON does not have (policy nonfinite: error); set another policy"


@pytest.mark.parametrize(
    ("refused", "message"),
    [(NO_TEXT, NO_TEXT_ADVICE), (NAN, f"output 'y': element 9 {NAN_ADVICE}")],
    ids=["no text", "nan"],
)
def test_error_tells_v1_clients_how_to_get_refused_values(refused: Output, message: str) -> None:
    for predicted, others in product((ROWS, COLUMNS), ([], [floats("z", 10)])):
        check_refused(UNFIT, message, predicted, refused, *others, nonfinite=Nonfinite.ERROR)


@pytest.mark.parametrize("rows", [3, 3000])
def test_element_index_counts_from_the_first_row(rows: int) -> None:
    """Whether rows are written one by one or many together."""
    values = np.zeros((rows, 60_000 // rows), "<f4")
    values[-1, -1] = math.nan
    wrong = output("y", "FP32", list(values.shape), values.tobytes())
    text = "output 'y': element 59999 is nan"
    check_refused(UNFIT, text, ROWS, wrong, floats("z", rows), nonfinite=Nonfinite.ERROR)


@pytest.mark.parametrize("predicted", [ROWS, COLUMNS])
def test_outputs_that_the_server_wrote_as_json_are_written(predicted: V1ResponseLayout) -> None:
    written = {"name": "y", "datatype": "FP32", "shape": [2], "data": [1, None]}
    found = response_to(predicted, floats("z", 2), Output("y", written, b""))
    expected = response_to(predicted, floats("z", 2), output("y", "FP32", [2], NAN_AT_END))
    assert str(found) == str(expected)


REFUSED: dict[str, tuple[list[Output], ErrorKind, str]] = {
    "a name twice": (
        [floats("y", 1), floats("z", 1), floats("y", 1)],
        BAD,
        "two outputs named 'y'",
    ),
    "no outputs": ([], BAD, "has no outputs"),
    "shared memory": (
        [Output("y", floats("y", 1).shown | {"parameters": {"shared_memory_region": "r"}}, b"")],
        BAD,
        "output 'y' of the server's response is not in binary form",
    ),
    "too short": ([output("y", "BYTES", [2], pack_bytes([b"a"]))], BAD, "output 'y'"),
    "cut short": (
        [texts("y", b"a"), Output("z", floats("z", 1).shown, b"")],
        BAD,
        "ends before all",
    ),
    "empty rows": (
        [floats("y", 99_999, 0), output("z", "BYTES", [99_999, 0], b"")],
        UNFIT,
        "output 'y' holds more than 65536 empty arrays; request it with the V2 protocol",
    ),
    "dimensions": (
        [floats("y", *[1] * 33)],
        UNFIT,
        "output 'y' has 33 dimensions; at most 32 are nested; request it with the V2 protocol",
    ),
}


@pytest.mark.parametrize(("outputs", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_broken_responses_and_those_that_v1_cannot_express_are_refused(
    outputs: list[Output], kind: ErrorKind, message: str
) -> None:
    for predicted in (ROWS, COLUMNS):
        check_refused(kind, message, predicted, *outputs)


LAYOUTS = [V1ResponseLayout(form, single) for form in V1Format for single in (False, True)]


def agrees(layout: V1ResponseLayout, *outputs: Output) -> bool:
    """Check that both ways agree; tell whether the fast path wrote the response."""
    body, size = response_body(list(outputs))
    found = write_prediction_fast(body, size, layout)
    if found is not None:
        count = sum(math.prod(each.shown["shape"]) for each in outputs)
        assert found == (convert([body], size, layout), count)
    return found is not None


@pytest.mark.parametrize("datatype", DTYPES)
def test_output_of_numbers_is_written(datatype: str) -> None:
    for layout, shape in product(LAYOUTS, ([1], [3], [2, 2], [1, 2, 3])):
        values = (np.arange(math.prod(shape)) / 3 + 1e-7).astype(DTYPES[datatype])
        assert agrees(layout, output("o", datatype, shape, values.tobytes()))


LEFT = {
    "none": [],
    "two": [floats("a", 2), floats("b", 2)],
    "empty": [floats("a", 0)],
    "deep": [floats("a", *[1] * 33)],
    "text": [texts("a", b"x")],
    "nan": [output("a", "FP32", [2], NAN_AT_END)],
    "no boolean": [output("a", "BOOL", [1], b"\2")],
}


@pytest.mark.parametrize("outputs", LEFT.values(), ids=LEFT)
def test_other_responses_are_left_to_the_streaming_path(outputs: list[Output]) -> None:
    assert not any(agrees(layout, *outputs) for layout in LAYOUTS)


@given(strategies.SEEDS)
@strategies.LAW
def test_every_response_is_written_alike_or_left(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 3) for _ in range(rng.randint(0, 3))]
    body, size = response_body([some_output(rng, "o", shape)])
    layout = rng.choice(LAYOUTS)
    found = write_prediction_fast(body, size, layout)
    try:
        assert found in (None, (convert([body], size, layout), math.prod(shape)))
    except GatewayError:
        assert found is None


def test_elements_of_rows_without_any_are_refused() -> None:
    element = struct.pack("<I", 1) + b"a"
    outputs = [
        {"name": name, "datatype": "BYTES", "shape": shape, "parameters": {"binary_data_size": 5}}
        for name, shape in (("a", [2, 0]), ("b", [2]))
    ]
    header = json.dumps({"model_name": "m", "outputs": outputs}).encode()
    converter = predict_converter(len(header), ROWS, JsonPolicies(), 1 << 20, 1 << 26)
    with pytest.raises(GatewayError, match=r"output 'a' .*shape \[2, 0\] takes 0"):
        converter.text(header + element)
