"""Outputs as the page gets them, of responses in each form, of whatever quality."""

import json
import math
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.admin.try_it.outputs import describe_output, read_error, read_outputs
from gateway.codec.elements.bytes_elements import pack_elements
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES
from tests.codec.reference import DTYPES
from tests.support.grpc.proto_file import message_class
from tests.support.inference_messages import HEADER_LENGTH

NAN, INF = math.nan, math.inf


def _headers(**headers: str) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(headers))


def _described(datatype: str, values: Any, shape: list[int] | None = None) -> dict[str, Any]:
    array = np.array(values, DTYPES.get(datatype))
    data = pack_elements(list(values)) if datatype == "BYTES" else array.tobytes()
    found = describe_output("y", DATATYPES[datatype], shape or list(array.shape), data)
    orjson.dumps(found)
    return found


def _statistics(described: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(described[name] for name in ("minimum", "maximum", "mean", "nonfinite"))


@pytest.mark.parametrize(
    ("datatype", "values", "shown"),
    [
        ("BOOL", [True, False], [True, False]),
        ("UINT8", [0, 255], [0, 255]),
        ("UINT64", [2**53, 2**53 + 1, 2**64 - 1], [2**53, str(2**53 + 1), str(2**64 - 1)]),
        ("INT64", [-(2**53), -(2**53) - 1, -(2**63)], [-(2**53), f"{-(2**53) - 1}", f"{-(2**63)}"]),
        ("FP16", [0.1, -65504, NAN], [0.1, -65500.0, None]),
        ("FP32", [0.1, 3e38, INF, -0.0], [0.1, 3e38, None, -0.0]),
        ("FP64", [0.1, 5e-324, -INF], [0.1, 5e-324, None]),
        ("BF16", [0.1, 2, NAN], [0.100097656, 2.0, None]),
        ("BYTES", [b"", "é".encode(), b"\xff\0"], ["", "é", "\ufffd\0"]),
    ],
)
def test_values_of_each_datatype(datatype: str, values: list[Any], shown: list[Any]) -> None:
    described = _described(datatype, values)
    assert (described["name"], described["datatype"]) == ("y", datatype)
    assert (described["elements"], described["shape"]) == (len(values), [len(values)])
    assert described["values"] == shown
    assert list(map(type, described["values"])) == list(map(type, shown))


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("shape", [[0], [2, 0]], ids=str)
def test_empty_tensor_has_no_statistics(datatype: str, shape: list[int]) -> None:
    described = _described(datatype, [], shape)
    assert (described["elements"], described["values"], described["shape"]) == (0, [], shape)
    assert _statistics(described) == (None, None, None, 0)
    assert described["histogram"] is None


def test_first_values_of_a_large_tensor_are_shown() -> None:
    described = _described("INT32", range(30_000))
    assert described["elements"] == 30_000
    assert described["values"] == list(range(10_000))
    assert _statistics(described) == (0, 29_999, 14_999.5, 0)
    assert described["histogram"] == {"low": 0, "high": 29_999, "counts": [750] * 40}
    described = _described("BYTES", [b"x"] * 30_000)
    assert (described["elements"], len(described["values"])) == (30_000, 10_000)


def test_long_text_is_cut() -> None:
    described = _described("BYTES", ["é😀".encode() * 10_000])
    assert described["values"] == ["é😀" * 500]


def test_statistics_leave_out_what_is_not_finite() -> None:
    assert _statistics(_described("FP32", [NAN, 1, INF, 3, -INF])) == (1, 3, 2, 3)
    assert _statistics(_described("FP16", [NAN, NAN])) == (None, None, None, 2)
    signaling = describe_output("y", DATATYPES["FP32"], [1], b"\x01\x00\x80\x7f")
    assert _statistics(signaling) == (None, None, None, 1)
    signaling = describe_output("y", DATATYPES["BF16"], [1], b"\x81\x7f")
    assert _statistics(signaling) == (None, None, None, 1)


@pytest.mark.parametrize(
    ("values", "has_histogram"),
    [
        ([1.0, 1.0], False),
        ([1.0, np.nextafter(1, 2)], False),  # there is no double between
        ([-1.7e308, 1.7e308], False),  # the range is no double
        ([0.0, 1e-300], True),
    ],
    ids=str,
)
def test_histogram_needs_a_range(values: list[float], has_histogram: bool) -> None:
    assert (_described("FP64", values)["histogram"] is not None) == has_histogram


@given(st.lists(st.floats(width=64), min_size=1, max_size=50))
def test_statistics_of_any_doubles_hold(values: list[float]) -> None:
    described = _described("FP64", values)
    finite = [each for each in values if math.isfinite(each)]
    assert described["nonfinite"] == len(values) - len(finite)
    if not finite:
        return
    low, high, mean, _ = _statistics(described)
    assert (low, high) == (min(finite), max(finite))
    assert low <= mean <= high
    if described["histogram"] is not None:
        counts = described["histogram"]["counts"]
        assert (described["histogram"]["low"], described["histogram"]["high"]) == (low, high)
        assert (len(counts), sum(counts)) == (40, len(finite))
        assert counts[0] > 0
        assert counts[-1] > 0


NUMBER = "JSON number"


def _v1(document: object) -> list[tuple[Any, ...]]:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    found = read_outputs("v1", _headers(), body)
    orjson.dumps(found)
    return [(each["name"], each["datatype"], each["shape"], each["values"]) for each in found]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"predictions": [[1, 2], [3, 4]]}, [("predictions", NUMBER, [2, 2], [1, 2, 3, 4])]),
        ({"predictions": [1.5, 2]}, [("predictions", NUMBER, [2], [1.5, 2.0])]),
        ({"predictions": [True]}, [("predictions", "JSON boolean", [1], [True])]),
        ({"predictions": [2**64 - 1]}, [("predictions", NUMBER, [1], [str(2**64 - 1)])]),
        ({"predictions": [[], []]}, [("predictions", NUMBER, [2, 0], [])]),
        # Scalars, which neither rows nor columns are.
        ({"predictions": 5}, [("predictions", NUMBER, [], [5])]),
        ({"predictions": None}, [("predictions", "JSON", [], ["null"])]),
        # Rows of different lengths, and elements of different types.
        ({"predictions": [[1, 2], [3]]}, [("predictions", "JSON", [2], ["[1, 2]", "[3]"])]),
        ({"predictions": [1, "é", None]}, [("predictions", "JSON", [3], ["1", "é", "null"])]),
        # NaN is no JSON, but servers in Python write it.
        ({"predictions": [1.5, NAN, -INF]}, [("predictions", NUMBER, [3], [1.5, None, None])]),
        ({"predictions": [NAN, 2**70]}, [("predictions", NUMBER, [2], [None, 2.0**70])]),
        ({"predictions": [2**70]}, [("predictions", NUMBER, [1], [2.0**70])]),
        # Several outputs.
        (
            {"predictions": [{"a": 1, "b": "x"}, {"a": 2}]},
            [("a", NUMBER, [2], [1, 2]), ("b", "JSON", [2], ["x", "null"])],
        ),
        (
            {"outputs": {"a": [1], "b": [[True]]}},
            [("a", NUMBER, [1], [1]), ("b", "JSON boolean", [1, 1], [True])],
        ),
        ({"predictions": [{"b64": "AA=="}]}, [("predictions", "JSON", [1], ['{"b64": "AA=="}'])]),
        (b'{"outputs": {"\\ud800": ["\\udfff", NaN]}}', [("?", "JSON", [2], ["?", "NaN"])]),
    ],
    ids=range(16),
)
def test_v1_outputs_are_what_the_json_says(document: object, expected: object) -> None:
    assert _v1(document) == expected


def test_v1_outputs_have_the_datatypes_that_the_model_declares() -> None:
    """V1 tells none: a number with a fraction is no FP64 for that."""

    def datatypes(document: object, **declared: str) -> list[str]:
        found = read_outputs("v1", _headers(), json.dumps(document).encode(), declared)
        return [each["datatype"] for each in found]

    rows = {"predictions": [1.5, 2]}
    assert datatypes(rows, OUTPUT0="FP32") == ["FP32"]
    assert datatypes(rows, a="FP32", b="INT32") == ["JSON number"]
    columns = {"outputs": {"a": [1.5], "b": [2], "c": ["x"]}}
    assert datatypes(columns, a="FP16", b="INT32") == ["FP16", "INT32", "JSON"]


def test_v1_texts_take_no_more_memory_than_they_have() -> None:
    """For numpy's own texts, each element would take the memory of the longest: 40 GB."""
    ((_, datatype, shape, values),) = _v1({"predictions": ["x" * 10**6] + ["y"] * 10_000})
    assert (datatype, shape, values[0]) == ("JSON", [10_001], "x" * 1000)


def test_v1_number_that_is_too_large_for_doubles_is_text() -> None:
    ((_, datatype, _, values),) = _v1(b'{"predictions": [NaN, 1%s]}' % (b"0" * 400))
    assert (datatype, values) == ("JSON", ["NaN", "1" + "0" * 400])


def test_v1_depth_is_no_error_of_the_gateway() -> None:
    (_,) = _v1(b'{"predictions": %b%b}' % (b"[" * 900, b"]" * 900))
    with pytest.raises(GatewayError, match="not JSON"):
        _v1(b'{"predictions": %b%b}' % (b"[" * 5000, b"]" * 5000))


@pytest.mark.parametrize(
    ("form", "headers", "body", "words"),
    [
        ("v1", {}, b"", "not JSON"),
        ("v1", {}, b"[]", "not an object"),
        ("v1", {}, b"{}", "neither predictions nor outputs"),
        ("json", {}, b"", "."),
        ("json", {}, b'{"outputs": [{}]}', "."),
        ("binary", {HEADER_LENGTH: "x"}, b"{}", HEADER_LENGTH),
        ("binary", {HEADER_LENGTH: "10"}, b"{}", "."),
        ("binary", {HEADER_LENGTH: "2"}, b"{}tensor", "."),
        ("grpc", {}, b"", "no message"),
        ("grpc", {}, b"\0\0", "no message"),
        ("grpc", {}, b"\0\0\0\0\x02\xff\xff", "."),
    ],
)
def test_invalid_response_is_an_error(
    form: str, headers: dict[str, str], body: bytes, words: str
) -> None:
    with pytest.raises(GatewayError, match=words):
        read_outputs(form, _headers(**headers), body)


def _binary(*outputs: tuple[str, str, list[int], bytes]) -> tuple[CIMultiDictProxy[str], bytes]:
    entries = [
        {
            "name": name,
            "datatype": datatype,
            "shape": shape,
            "parameters": {"binary_data_size": len(data)},
        }
        for name, datatype, shape, data in outputs
    ]
    header = json.dumps({"model_name": "m", "outputs": entries}).encode()
    parts = b"".join(data for *_, data in outputs)
    return _headers(**{HEADER_LENGTH: str(len(header))}), header + parts


OUTPUTS: tuple[tuple[str, str, list[int], bytes], ...] = (
    ("a", "FP32", [2], np.array([1.5, NAN], "<f4").tobytes()),
    ("b", "BYTES", [], pack_elements([b"\xff"])),
    ("c", "INT64", [0, 3], b""),
    ("d", "BF16", [1], np.array([2], ml_dtypes.bfloat16).tobytes()),
)
SHOWN = [("a", [1.5, None]), ("b", ["\ufffd"]), ("c", []), ("d", [2.0])]


def test_binary_and_grpc_responses_are_read() -> None:
    found = read_outputs("binary", *_binary(*OUTPUTS))
    assert [(each["name"], each["values"]) for each in found] == SHOWN
    message = message_class("ModelInferResponse")(model_name="m")
    for name, datatype, shape, data in OUTPUTS:
        message.outputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_output_contents.append(data)
    body = message.SerializeToString()
    found = read_outputs("grpc", _headers(), b"\0" + len(body).to_bytes(4, "big") + body)
    assert [(each["name"], each["values"]) for each in found] == SHOWN


def test_json_response_is_read() -> None:
    entry = {"name": "a", "datatype": "FP16", "shape": [1, 2], "data": [[0.5, None]]}
    text = {"name": "b", "datatype": "BYTES", "shape": [1], "data": ["é"]}
    body = json.dumps({"model_name": "m", "outputs": [entry, text]}).encode()
    found = read_outputs("json", _headers(), body)
    assert [(each["name"], each["values"]) for each in found] == [("a", [0.5, None]), ("b", ["é"])]


@given(
    st.sampled_from(["json", "binary", "raw", "v1", "grpc"]),
    st.binary(max_size=40),
    st.integers(0, 400),
    st.none() | st.integers(0, 300),
)
def test_broken_response_is_an_error_at_most(
    form: str, noise: bytes, at: int, length: int | None
) -> None:
    headers, body = _binary(*OUTPUTS)
    if length is not None:
        headers = _headers(**{HEADER_LENGTH: str(length)})
    elif form == "json":
        headers = _headers()
    with suppress(GatewayError):
        orjson.dumps(read_outputs(form, headers, body[:at] + noise + body[at + len(noise) :]))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": "no such model"}', "no such model"),
        (b'{"error": 5}', '{"error": 5}'),
        (b"[1]", "[1]"),
        (b"<html>\xff", "<html>\ufffd"),
        (b"", ""),
        (b"x" * 5000, "x" * 1000),
    ],
)
def test_error_is_told_in_its_own_words(body: bytes, words: str) -> None:
    assert read_error(body) == words
