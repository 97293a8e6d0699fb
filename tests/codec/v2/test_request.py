from __future__ import annotations

import base64
import itertools
import json
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from gateway.codec.json import array_scanner
from gateway.codec.v2.request import InferRequest, InferRequestConverter, header_without_data
from gateway.errors import ErrorKind, GatewayError
from gateway.sizes import QUOTED_NAME
from tests.codec import strategies
from tests.codec.reference import PlainRequest, RefusedError, convert_request, pack_bytes
from tests.support.scale import scaled

HEADER_CAP = 1 << 20
DEPTH_CAP = 12
WINDOW = array_scanner.WINDOW
STRING_WINDOW = array_scanner.STRING_WINDOW
# Small windows too, so that every place is at the edge of one.
WINDOWS = (24, 32, 64, WINDOW)


@dataclass(frozen=True)
class Accepted:
    header: bytes
    tensors: list[bytes | int]
    binary_by_default: bool
    binary_by_output: dict[str, bool]
    content_length: int
    expected_size: int
    as_base64: frozenset[str] = frozenset()

    @property
    def fields(self) -> Any:
        return json.loads(self.header)


@dataclass(frozen=True)
class Failed:
    kind: ErrorKind
    message: str


Outcome = Accepted | Failed


def outcome(
    pieces: list[bytes],
    *,
    work: bool = True,
    header_cap: int = HEADER_CAP,
    depth_cap: int = DEPTH_CAP,
) -> Outcome:
    """Convert a body; `work` says whether to convert between the pieces."""
    codec = InferRequestConverter(header_cap, depth_cap)
    try:
        for piece in pieces:
            codec.feed(piece)
            while work and codec.work():
                pass
        codec.feed(b"", last=True)
        request = codec.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return Accepted(
        request.header,
        [part if isinstance(part, int) else b"".join(part) for part in request.tensors],
        request.answer.binary_by_default,
        dict(request.answer.binary_by_output),
        request.content_length,
        request.expected_size,
        request.answer.as_base64,
    )


def converted(body: bytes) -> Accepted:
    found = outcome([body])
    assert isinstance(found, Accepted)
    return found


def plain_outcome(body: bytes) -> PlainRequest | None:
    try:
        return convert_request(body, DEPTH_CAP)
    except RefusedError:
        return None


def agrees(found: Outcome, plain: PlainRequest | None) -> bool:
    if isinstance(found, Failed):
        without_comma = "bytes without a comma" in found.message
        return found.kind is ErrorKind.BAD_REQUEST and (plain is None or without_comma)
    return plain is not None and (
        normal(found.header) == json.dumps(plain.header)
        and found.tensors == plain.tensors
        and found.binary_by_default == plain.binary_by_default
        and found.binary_by_output == plain.binary_by_output
        and found.as_base64 == plain.as_base64
        and found.content_length == len(found.header) + sum(map(size, plain.tensors))
        and found.expected_size == sum(part for part in plain.tensors if isinstance(part, int))
    )


def size(part: bytes | int) -> int:
    return part if isinstance(part, int) else len(part)


def normal(header: bytes) -> str:
    """Return a header in a normal form, with integers as a 64-bit library parses them."""

    def to_int(digits: str) -> int | float:
        value = int(digits)
        return value if -(2**63) <= value < 2**64 else float(value)

    return json.dumps(json.loads(header, parse_int=to_int))


def check_law(body: bytes, seed: int, window: int) -> None:
    with strategies.windows_of(window):
        found = outcome([body])
        assert agrees(found, plain_outcome(body)), found
        assert outcome([body], work=False) == found
        assert outcome(strategies.cut(body, seed)) == found
        assert outcome(strategies.cut(body, seed + 1), work=False) == found
        assert outcome(strategies.bytewise(body)) == found


# ---------------------------------------------------------------------------- independence of
# splits


@pytest.mark.parametrize("window", WINDOWS)
@strategies.LAW
@given(body=strategies.request_bodies(), seed=strategies.SEEDS)
def test_request_is_the_same_however_split(window: int, body: bytes, seed: int) -> None:
    check_law(body, seed, window)


@pytest.mark.parametrize("window", WINDOWS)
@strategies.LAW
@given(body=strategies.request_bodies(faulty=True), seed=strategies.SEEDS)
def test_faulty_elements_are_refused_however_split(window: int, body: bytes, seed: int) -> None:
    check_law(body, seed, window)


@pytest.mark.parametrize("window", WINDOWS)
@strategies.LAW
@given(body=strategies.request_bodies(), seed=strategies.SEEDS)
def test_broken_text_is_refused_however_split(window: int, body: bytes, seed: int) -> None:
    check_law(strategies.mutated(body, seed), seed, window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seeds", range(4))
def test_broken_arrays_are_refused_however_split(window: int, seeds: int) -> None:
    # No strategy here: many small bodies in which only the array is broken.
    for seed in range(seeds * 500, seeds * 500 + scaled(500)):
        body = strategies.array_body(random.Random(seed))
        check_law(body, seed, window)


@strategies.LAW
@given(body=strategies.request_bodies(faulty=True), seed=strategies.SEEDS)
def test_caps_apply_however_split(body: bytes, seed: int) -> None:
    for header_cap, depth_cap in ((60, 64), (200, 64), (HEADER_CAP, 4)):
        split = [[body], strategies.cut(body, seed), strategies.bytewise(body)]
        found, *others = [
            outcome(pieces, header_cap=header_cap, depth_cap=depth_cap) for pieces in split
        ]
        assert others == [found, found]
        assert isinstance(found, Accepted) or found.kind.value.status in (400, 413)


# ---------------------------------------------------------------------------------- the table


def request_body(datatype: str, shape: str, data: str, *more: str) -> bytes:
    entry = [f'"name":"x","datatype":"{datatype}","shape":{shape},"data":{data}', *more]
    return ('{"inputs":[{' + ",".join(entry) + "}]}").encode()


def pack(code: str, *values: float) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


NAN, INFINITY = float("nan"), float("inf")

# PROTOCOL.md, "JSON requests at Triton, and what the gateway answers": what is accepted.
ACCEPTED = [
    ("FP32", "[3]", "[NaN, Infinity, -Infinity]", pack("f", NAN, INFINITY, -INFINITY)),
    ("FP64", "[3]", "[NaN, Infinity, -Infinity]", pack("d", NAN, INFINITY, -INFINITY)),
    ("FP16", "[2]", "[Infinity, 1.5]", pack("e", INFINITY, 1.5)),
    ("BF16", "[2]", "[-Infinity, 1.5]", b"\x80\xff\xc0\x3f"),
    ("FP32", "[2]", "[1, -2]", pack("f", 1, -2)),
    ("FP64", "[1]", "[123456789012345678901]", pack("d", 123456789012345678901)),
    ("INT32", "[3]", "[[1], [2, 3]]", pack("i", 1, 2, 3)),
    ("INT32", "[2, 2]", "[1, 2, 3, 4]", pack("i", 1, 2, 3, 4)),
    ("INT32", "[4]", "[[1, 2], [3, 4]]", pack("i", 1, 2, 3, 4)),
    ("INT32", "[2, 2]", "[[1, 2], [3, 4]]", pack("i", 1, 2, 3, 4)),
    ("INT32", "[]", "[7]", pack("i", 7)),
    ("INT32", "[0]", "[]", b""),
    ("INT32", "[3, 0]", "[[], [], []]", b""),
    ("BYTES", "[0]", "[]", b""),
    ("BOOL", "[2]", "[true, false]", b"\1\0"),
    ("UINT64", "[1]", "[18446744073709551615]", b"\xff" * 8),
    ("INT64", "[1]", "[-9223372036854775808]", b"\0" * 7 + b"\x80"),
    ("FP64", "[2]", "[0.1, 0.30000000000000004]", pack("d", 0.1, 0.1 + 0.2)),
    ("FP64", "[1]", "[2.2250738585072011e-308]", pack("d", 2.2250738585072011e-308)),
    ("BYTES", "[2]", r'["a\u0000b", "é"]', pack_bytes([b"a\0b", "é".encode()])),
    ("BYTES", "[1]", r'["\ud83d\ude00"]', pack_bytes(["😀".encode()])),
]


@pytest.mark.parametrize(("datatype", "shape", "data", "expected"), ACCEPTED)
def test_valid_requests_are_converted(
    datatype: str, shape: str, data: str, expected: bytes
) -> None:
    body = request_body(datatype, shape, data)
    found = converted(body)
    assert found.tensors == [expected]
    assert found.fields == {
        "inputs": [
            {
                "name": "x",
                "datatype": datatype,
                "shape": json.loads(shape),
                "parameters": {"binary_data_size": len(expected)},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    for pieces in (strategies.bytewise(body), strategies.cut(body, 1)):
        assert outcome(pieces) == found


DEEP = 100_000
X = "input 'x': "
NOT_JSON = "the request is not valid JSON"
NOT_AN_ARRAY = X + "data must be an array, got "
TOO_DEEP = X + f"data is nested deeper than {DEPTH_CAP}"

# The same table: what is refused, each with 400.
REFUSED = [
    (request_body("UINT8", "[2]", "[0,300]"), X + "element 1 (300) does not fit UINT8"),
    (
        request_body("INT32", "[1]", "[-2147483649]"),
        X + "element 0 (-2147483649) does not fit INT32",
    ),
    (request_body("FP32", "[3]", "[1,2,1e40]"), X + "element 2 (1e40) does not fit FP32"),
    (request_body("FP64", "[1]", "[1e400]"), X + "element 0 (1e400) does not fit FP64"),
    (request_body("FP32", "[1]", "[-1e400]"), X + "element 0 (-1e400) does not fit FP32"),
    (
        request_body("INT64", "[1]", "[9223372036854775808]"),
        X + "element 0 (9223372036854775808) does not fit INT64",
    ),
    (request_body("UINT64", "[1]", "[-1]"), X + "element 0 (-1) does not fit UINT64"),
    (
        request_body("INT32", "[2]", "[1,1.0]"),
        X + "element 1 (1.0) is not an integer, as INT32 needs",
    ),
    (request_body("BOOL", "[1]", "[1]"), X + "element 0 (1) is not true or false, as BOOL needs"),
    (request_body("FP32", "[1]", "[true]"), X + "element 0 (true) is not a number, as FP32 needs"),
    (request_body("FP32", "[1]", '["1"]'), X + 'element 0 ("1") is not a number, as FP32 needs'),
    (
        request_body("FP32", "[1]", '["1.5"]'),
        X + 'element 0 ("1.5") is not a number, as FP32 needs',
    ),
    (
        request_body("INT64", "[2]", '[1,"2"]'),
        X + 'element 1 ("2") is not an integer, as INT64 needs',
    ),
    (
        request_body("FP64", "[1]", '["NaN"]'),
        X + 'element 0 ("NaN") is not a number, as FP64 needs',
    ),
    (
        request_body("BOOL", "[1]", '["true"]'),
        X + 'element 0 ("true") is not true or false, as BOOL needs',
    ),
    (request_body("FP32", "[1]", "[null]"), X + "element 0 (null) is not a number, as FP32 needs"),
    (request_body("BYTES", "[1]", "[7]"), X + "element 0 (7) is not a string, as BYTES needs"),
    (
        request_body("BYTES", "[2]", '["a",7]'),
        X + "element 1 (7) is not a string, as BYTES needs",
    ),
    (
        request_body("INT32", "[2,2]", "[1,2,3]"),
        X + "shape [2, 2] takes 4 elements, data has 3",
    ),
    (request_body("INT32", "[0]", "[1]"), X + "shape [0] takes 0 elements, data has 1"),
    (request_body("INT32", "[]", "[]"), X + "shape [] takes 1 elements, data has 0"),
    (
        request_body("INT32", "[-1]", "[1]"),
        X + "shape [-1] must hold integers of 0 or more only",
    ),
    (request_body("INT32", "[1]", "1"), NOT_AN_ARRAY + "a number"),
    (request_body("INT32", "[1]", '"1"'), NOT_AN_ARRAY + "a string"),
    (request_body("INT32", "[1]", '{"0":[1]}'), NOT_AN_ARRAY + "an object"),
    (request_body("INT32", "[1]", "null"), NOT_AN_ARRAY + "null"),
    (
        b'{"note":"'
        + b"long " * 40
        + b'","x":{"data":1},'
        + request_body("INT32", "[1]", "null")[1:],
        NOT_AN_ARRAY + "null",
    ),
    (
        request_body("FP8", "[1]", "[1]"),
        X + 'unknown datatype "FP8"; known are BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, '
        "INT32, INT64, FP16, FP32, FP64, BF16, BYTES",
    ),
    (
        request_body("INT32", "[1]", "[" * DEEP + "]" * DEEP),
        TOO_DEEP,
    ),
    (
        request_body("BYTES", "[1]", "[" * DEEP + '"a"' + "]" * DEEP),
        TOO_DEEP,
    ),
    (
        request_body("BYTES", "[1]", '["a",' + "[" * DEEP + "]" * DEEP + "]"),
        TOO_DEEP,
    ),
    (
        request_body("INT32", "[1]", "[1]", '"y":' + "[" * DEEP + "]" * DEEP),
        "the request is JSON nested deeper than 1024",
    ),
    (
        request_body("INT32", "[1]", "[1]", '"y":' + "[" * 100 + "]" * 100),
        f"the request's JSON is nested deeper than {DEPTH_CAP}",
    ),
    (
        request_body("BYTES", "[2]", r'["a","\ud83d"]'),
        X + r'element 1 ("\ud83d") holds half of a surrogate pair',
    ),
    (
        request_body("BYTES", "[1]", r'["\udc00"]'),
        X + r'element 0 ("\udc00") holds half of a surrogate pair',
    ),
    (request_body("INT32", "[1]", "[1]", '"data":[1]'), "input 'x' has more than one data"),
    (request_body("INT32", "[1]", "[1]", '"data":1'), NOT_AN_ARRAY + "a number"),
    (b'{"id":7,' + request_body("INT32", "[1]", "[1]")[1:], "id must be a string, got 7"),
    (b'{"id":null,' + request_body("INT32", "[1]", "[1]")[1:], "id must be a string, got null"),
    (b"", NOT_JSON + " ("),
    (b" \n", NOT_JSON + " ("),
    (b"\xff" * 99, NOT_JSON + " ("),
    (b"[" * DEEP, "the request is JSON nested deeper than 1024"),
    (b'{"a":' * DEEP, "the request is JSON nested deeper than 1024"),
    (b'{"x":[' * DEEP, "the request is JSON nested deeper than 1024"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_invalid_requests_are_refused(body: bytes, message: str) -> None:
    found = outcome([body])
    assert isinstance(found, Failed)
    assert found.kind.value.status == 400
    assert found.message == message if not message.endswith("(") else message in found.message
    assert len(found.message) < 300
    if len(body) < 1000:
        assert outcome(strategies.bytewise(body)) == found
    assert outcome(strategies.cut(body, 1)) == found


@pytest.mark.parametrize("start", ["{", "{ ", "{\n  ", "\n {\n\t "])
def test_many_tiny_values_beside_the_data_are_accepted(start: str) -> None:
    """orjson alone fails on them if the text before them looks indented."""
    many = "[" + "1," * 5000 + "1]"
    body = start + f'"parameters":{{"x":{many}}},' + request_body("INT8", "[1]", "[7]")[1:].decode()
    for pieces in ([body.encode()], strategies.cut(body.encode(), 1)):
        found = outcome(pieces, header_cap=1 << 20)
        assert isinstance(found, Accepted)
        assert json.loads(found.header)["parameters"]["x"] == [1] * 5001
    broken = body[:-1] + "x"
    assert outcome([broken.encode()], header_cap=1 << 20) == Failed(
        ErrorKind.BAD_REQUEST,
        "the request is not valid JSON (unexpected character, expected ',' or '}' "
        f"at byte {len(body) - 1}), near: " + 'pe":[1],"data":[…]}]x',
    )


V1_AT_V2 = (
    "inputs is missing; the request has instances, as in the V1 protocol: "
    "send such a request to /v1/models/MODEL:predict"
)


@pytest.mark.parametrize(
    "instances", ["[[1,2],[3,4]]", "[" + "1," * 100_000 + "1]", '[{"data":1}]']
)
@pytest.mark.parametrize("space", ["", " \n"])
def test_v1_request_is_pointed_to_the_v1_path(instances: str, space: str) -> None:
    body = f'{space}{{{space}"instances"{space}:{instances},"parameters":{{}}}}'.encode()
    for pieces in ([body], strategies.cut(body, 1), strategies.cut(body, 2)):
        assert outcome(pieces) == Failed(ErrorKind.BAD_REQUEST, V1_AT_V2)


@pytest.mark.parametrize("tensor", [bytes(8), b"\0\0\x80\xbf" * 2, b"\xff" * 200_000])
@pytest.mark.parametrize("data", [b"", b',{"name":"y","shape":[1],"datatype":"INT8","data":[17]}'])
def test_error_for_missing_header_length_names_its_value(tensor: bytes, data: bytes) -> None:
    entry = b'{"name":"x","shape":[2],"datatype":"FP32","parameters":{"binary_data_size":8}}'
    header = b'{"inputs":[' + entry + data + b"]}"
    body = header + tensor
    message = (
        f"bytes follow the request's JSON of {len(header)} bytes: a request with binary tensors "
        f"needs the header Inference-Header-Content-Length: {len(header)}"
    )
    for pieces in ([body], strategies.cut(body, 1), strategies.cut(body, 2)):
        assert outcome(pieces) == Failed(ErrorKind.BAD_REQUEST, message)


def test_unknown_keys_are_passed_through() -> None:
    body = (
        b'{"model_name":"other","x":{"data":{"y":[1.5,null,true,"\xc3\xa9\\u0000"]}},'
        b'"inputs":[{"more":[1],"name":"x","shape":[1],"datatype":"INT8","data":[1],"last":{}}],'
        b'"parameters":{"priority":18446744073709551615,"sequence":-9223372036854775808}}'
    )
    expected = json.loads(body)
    entry = expected["inputs"][0]
    del entry["data"]
    entry["parameters"] = {"binary_data_size": 1}
    expected["parameters"]["binary_data_output"] = True
    header = converted(body).header
    assert json.loads(header) == expected
    assert list(json.loads(header)) == ["model_name", "x", "inputs", "parameters"]


def test_classification_and_shared_memory_are_passed_through() -> None:
    body = (
        b'{"inputs":[{"name":"x","shape":[2],"datatype":"INT8",'
        b'"parameters":{"shared_memory_region":"r","shared_memory_byte_size":2}}],'
        b'"outputs":[{"name":"y","parameters":{"classification":3,"binary_data":true}},'
        b'{"name":"z","parameters":{"shared_memory_region":"s"}}]}'
    )
    found = converted(body)
    assert found == Accepted(body, [], False, {"y": True, "z": False}, len(body), 0)


@pytest.mark.parametrize(
    "outputs",
    [
        b'"outputs":[{"name":"y","parameters":{"classification":1,"classification":0,%b}}]',
        b'"outputs":[{"name":"y","parameters":{"cl\\u0061ssification":1,"classification":0,%b}}]',
        b'"outputs":[{"name":"y","parameters":{"classification":1}}],'
        b'"outputs":[{"name":"y","parameters":{%b}}]',
    ],
)
def test_a_server_sees_no_classification_that_the_gateway_does_not(outputs: bytes) -> None:
    # Triton takes the first of two equal keys, the gateway the last.
    body = b'{"inputs":[{"name":"x","shape":[2],"datatype":"INT8","parameters":{%b}}],%b}' % (
        b'"binary_data_size":2',
        outputs % b'"binary_data":true',
    )
    codec = InferRequestConverter(1000, 64)
    codec.feed(body, last=True)
    request = codec.finish()
    assert request.features.is_plain
    assert b'"classification":1' not in request.header
    assert b"\\u0061" not in request.header


def test_request_without_changes_is_passed_byte_for_byte() -> None:
    body = (
        b'{ "inputs" : [{"name":"x", "shape":[2], "datatype":"INT8",\n'
        b'"parameters": {"binary_data_size": 2}}], "parameters": {"binary_data_output": true},'
        b' "x": 123456789012345678901234567890 }'
    )
    for pieces in ([body], strategies.bytewise(body)):
        assert outcome(pieces) == Accepted(body, [2], True, {}, len(body) + 2, 2)


_BINARY_INPUT = b'{"name":"x","shape":[2],"datatype":"INT8","parameters":{"binary_data_size":2}}'


def _in_words(text: bytes, depth_cap: int = DEPTH_CAP) -> InferRequest | Failed | None:
    try:
        return header_without_data(text, depth_cap)
    except GatewayError as error:
        return Failed(error.kind, error.message)


def _by_the_codec(text: bytes, depth_cap: int = DEPTH_CAP) -> InferRequest | Failed:
    codec = InferRequestConverter(HEADER_CAP, depth_cap)
    try:
        codec.feed(text, last=True)
        return codec.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[%b]}' % _BINARY_INPUT,
        b'{"inputs":[%b, %b]}' % (_BINARY_INPUT, _BINARY_INPUT),
        b'{"id":"7","inputs":[%b],"parameters":{"binary_data_output":true}}' % _BINARY_INPUT,
        b'{"inputs":[%b],"outputs":[{"name":"y"}]}' % _BINARY_INPUT,
        b'{"inputs":[%b],"outputs":[{"name":"y","parameters":{"classification":1}}]}'
        % _BINARY_INPUT,
        b'{"inputs":[%b],"parameters":{"priority":-1}}' % _BINARY_INPUT,
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT8",'
        b'"parameters":{"shared_memory_region":"r","shared_memory_byte_size":1}}]}',
        b'{"inputs":[%b]} ' % _BINARY_INPUT.replace(b"[2]", b"[3]"),
        b'{"inputs":[%b]' % _BINARY_INPUT,
        b'{"inputs":[{}]}',
        b'{"inputs":5}',
        b"[]",
        b"",
        b'{"inputs":[%b],"x":[[[[[[[[[[[[[]]]]]]]]]]]]]}' % _BINARY_INPUT,
    ],
)
def test_cached_header_is_read_like_any_other(text: bytes) -> None:
    expected = _by_the_codec(text)
    assert [_in_words(text), _in_words(text)] == [expected, expected]


def test_header_cache_distinguishes_caps() -> None:
    text = b'{"inputs":[%b]}' % _BINARY_INPUT
    assert isinstance(_in_words(text), InferRequest)
    assert _in_words(text, depth_cap=2) == _by_the_codec(text, depth_cap=2)
    assert isinstance(_in_words(text, depth_cap=2), Failed)


@pytest.mark.parametrize("key", [b'"data"', b'"\\u0064ata"', b'"d\\u0061ta"'])
def test_header_that_may_contain_data_is_not_cached(key: bytes) -> None:
    text = b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT8",%b:[1]}]}' % key
    assert header_without_data(text, DEPTH_CAP) is None


def test_json_and_binary_inputs_keep_their_order() -> None:
    body = (
        b'{"inputs":[{"name":"a","shape":[2],"datatype":"INT8","data":[1,2]},'
        b'{"name":"b","shape":[3],"datatype":"FP32","parameters":{"binary_data_size":12}},'
        b'{"name":"c","shape":[1],"datatype":"BYTES","data":["z"],"parameters":{"p":1}},'
        b'{"name":"d","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":9}}]}'
    )
    found = converted(body)
    assert found.tensors == [b"\1\2", 12, b"\1\0\0\0z", 9]
    assert found.expected_size == 21
    assert found.content_length == len(found.header) + 28
    sizes = [entry["parameters"]["binary_data_size"] for entry in found.fields["inputs"]]
    assert sizes == [2, 12, 5, 9]
    assert found.fields["inputs"][2]["parameters"] == {"p": 1, "binary_data_size": 5}


def test_chunks_form_the_tensor() -> None:
    codec = InferRequestConverter(HEADER_CAP, DEPTH_CAP)
    codec.feed(request_body("INT32", "[50000]", json.dumps(list(range(50_000)))), last=True)
    (tensor,) = codec.finish().tensors
    assert not isinstance(tensor, int)
    assert len(tensor) > 1
    assert b"".join(tensor) == np.arange(50_000, dtype="<i4").tobytes()


# ---------------------------------------------------------------------------------- more refusals

ENDS_INSIDE = "the request ends at byte 62, inside the data of input 'x'"
OTHERS = [
    (
        b'{"inputs":[{"name":"x","shape":[1],"data":[1]}]}',
        X + "datatype is missing",
    ),
    (
        request_body("INT32", "[1]", "[1]", '"datatype":"INT64"'),
        "input 'x' has more than one datatype",
    ),
    (
        request_body("INT32", "[1]", "[1]", '"parameters":{"binary_data_size":4}'),
        "input 'x' needs exactly one of data, binary_data_size and shared_memory_region; "
        "it has data and binary_data_size",
    ),
    (
        b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1]}],"inputs":[]}',
        "the request has the key inputs more than once",
    ),
    (
        b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1]}],"inputs":'
        b'[{"name":"y","datatype":"INT8","shape":[1],"parameters":{"binary_data_size":1}}]}',
        "the request has the key inputs more than once",
    ),
    (
        rb'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"\u0064ata":[1]}]}',
        X + 'data must be given once, under the key "data" written without escapes',
    ),
    (
        rb'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"\u0064ata":0}]}',
        X + "data must be an array, got 0",
    ),
    # The value of the second data would look like a placeholder.
    *(
        (b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],%b}%b]}' % (members, behind), text)
        for behind in (b"", b',{"name":"y","datatype":"INT8","shape":[1],"data":[1]}')
        for members, text in (
            (rb'"data":[1],"\u0064ata":0', "input 'x' has more than one data"),
            (rb'"data":[1],"\u0064ata":[0]', "input 'x' has more than one data"),
            (rb'"\u0064ata":[0],"data":[1]', "input 'x' has more than one data"),
            (rb'"\u0064ata":0,"data":[1]', "input 'x' has more than one data"),
            (rb'"data":0,"data":[1]', X + "data must be an array, got a number"),
        )
    ),
    (
        b'{"inputs":[{"data":["x"],"name":"x","datatype":"INT8","shape":[1]}]}',
        X + 'element 0 ("x") is not an integer, as INT8 needs',
    ),
    (
        b'{"inputs":[{"datatype":"INT8","data":["x"],"name":"x","shape":[1]}]}',
        'inputs[0]: element 0 ("x") is not an integer, as INT8 needs',
    ),
    (
        b'{"inputs":[{"name":"x","data":["x"],"datatype":"INT8","shape":[1]}]}',
        X + 'element 0 ("x") is not an integer, as INT8 needs',
    ),
    (request_body("INT8", "[1]", "[1")[:-3], ENDS_INSIDE),
    (
        request_body("INT8", "[1]", '[1,{"a":2}]'),
        X + "element 1 is an object, INT8 needs an integer",
    ),
    (
        b'{"inputs":[{"name":"x","data":[1,{"a":2}],"datatype":"INT8"',
        X + 'data is not an array of plain values, at byte 33, near: {"a":2}],"datatype":"INT8"',
    ),
    (request_body("INT8", "[1]", "[1,]"), X + "data is not a valid JSON array, near element 0"),
    (request_body("INT8", "[1]", "[,1]"), X + "data is not a valid JSON array, near element 0"),
    (request_body("INT8", "[2]", "[1]]"), X + "data has a closing bracket too many"),
    (request_body("INT8", "[2]", "[1][2]"), X + "data is not a valid JSON array, near element 1"),
    (request_body("INT8", "[2]", "[1] 2,3"), X + "data ends and is followed by 2, behind"),
]


@pytest.mark.parametrize(
    "note", ['{"data":1,"data":{"x":2}}', '{"data":1,"data":2}', '{"inputs":1,"inputs":[2]}']
)
def test_duplicate_keys_outside_of_tensors_pass(note: str) -> None:
    for body in (
        request_body("INT8", "[1]", "[1]", f'"note":{note}'),
        request_body("INT8", "[1]", "[1]")[:-1] + f',"note":{note}}}'.encode(),
    ):
        check_law(body, 1, 24)
        assert isinstance(outcome([body]), Accepted)


@pytest.mark.parametrize(("body", "message"), OTHERS)
def test_other_invalid_requests_are_refused(body: bytes, message: str) -> None:
    found = outcome([body])
    assert isinstance(found, Failed)
    assert found.kind.value.status == 400
    assert found.message.startswith(message)
    assert outcome(strategies.bytewise(body)) == found
    assert outcome(strategies.cut(body, 2), work=False) == found


FIRST_FAULT = '{"name":"a","shape":[1],"data":["x"],"datatype":"INT8"}'


@pytest.mark.parametrize(
    "behind",
    [
        '{"name":"b","datatype":"INT8","shape":[1],"data":["y"]}',
        '{"name":"b","datatype":"INT8","shape":[1],"data":' + "[" * 99 + "]" * 99 + "}",
        '{"name":"b","datatype":"INT8","shape":[1],"data":[1,' + "1" * 70_000 + "]}",
        '{"name":"b","data":5}',
        '{"name":"b","data":[1],"data":[2]}',
        '{"name":"b","x":{"data":[1]}}',
        '{"name":"' + "b" * 3000 + '","data":[1]}',
        '{"name":"b","shape":[1],"data":["y"],"datatype":"INT8"}',
        '{"name":7,"data":[1]}',
        '{"name":"b" nonsense',
    ],
)
def test_first_of_two_errors_is_reported(behind: str) -> None:
    # The first waits for its datatype; the text behind it does not.
    body = ('{"inputs":[' + FIRST_FAULT + ',{"data":[]},' + behind + "]}").encode()
    found = outcome([body], header_cap=2000)
    assert isinstance(found, Failed)
    assert found.message == "input 'a': element 0 (\"x\") is not an integer, as INT8 needs"
    for work in (True, False):
        for pieces in (strategies.bytewise(body), strategies.cut(body, 3), [body]):
            assert outcome(pieces, work=work, header_cap=2000) == found


def test_data_before_its_datatype_is_converted_in_steps() -> None:
    # Sorted keys, as many clients write them.
    numbers = json.dumps(list(range(100_000)))
    codec = InferRequestConverter(HEADER_CAP, DEPTH_CAP)
    codec.feed(b'{"inputs":[{"data":' + numbers.encode())
    codec.feed(b',"datatype":"INT32","name":"a","shape":[100000]}]}')
    assert not codec.work()
    codec.feed(b"", last=True)
    rounds = 0
    while codec.work():
        rounds += 1
    assert rounds > 3
    (tensor,) = codec.finish().tensors
    assert not isinstance(tensor, int)
    assert b"".join(tensor) == np.arange(100_000, dtype="<i4").tobytes()


@pytest.mark.parametrize(
    ("datatype", "element", "window"), [("INT8", "1", WINDOW), ("BYTES", '""', STRING_WINDOW)]
)
def test_large_feed_is_converted_in_steps(datatype: str, element: str, window: int) -> None:
    body = request_body(datatype, "[200000]", "[" + ",".join([element] * 200_000) + "]")
    codec = InferRequestConverter(HEADER_CAP, DEPTH_CAP)
    codec.feed(body)
    assert codec.buffered_data_bytes > len(body) - 200
    rounds = 0
    while codec.work():
        rounds += 1
    assert rounds >= len(body) // window
    assert codec.buffered_data_bytes == 200_000 * (4 if datatype == "BYTES" else 1)


def test_many_arrays_are_converted_in_steps() -> None:
    entry = '{"name":"x%d","datatype":"INT8","shape":[1],"data":[%d]}'
    body = '{"inputs":[' + ",".join(entry % (i, i % 100) for i in range(2000)) + "]}"
    codec = InferRequestConverter(HEADER_CAP, DEPTH_CAP, tensor_cap=2000)
    codec.feed(body.encode(), last=True)
    rounds, before = 0, codec.buffered_data_bytes
    while codec.work():
        rounds += 1
        assert abs(codec.buffered_data_bytes - before) <= 64 * len("[00]")
        before = codec.buffered_data_bytes
    assert 2 * 2000 / 64 < rounds < 200
    tensors = codec.finish().tensors
    assert tensors == tuple([bytes([i % 100])] for i in range(2000))


def test_queued_data_is_converted_in_steps() -> None:
    numbers = json.dumps(list(range(100_000)))
    codec = InferRequestConverter(HEADER_CAP, DEPTH_CAP)
    codec.feed(b'{"inputs":[{"name":"a","data":' + numbers.encode())
    assert not codec.work()
    codec.feed(b',"datatype":"INT32","shape":[100000]},{"name":"b","data":[1],')
    rounds = 0
    while codec.work():
        rounds += 1
    assert rounds > 3
    codec.feed(b'"datatype":"INT8","shape":[1]}]}', last=True)
    first, second = codec.finish().tensors
    assert not isinstance(first, int)
    assert b"".join(first) == np.arange(100_000, dtype="<i4").tobytes()
    assert second == [b"\1"]


# ---------------------------------------------------------------------------------- base64

BASE64 = '"parameters":{"content_type":"base64"}'
NOT_BASE64 = X + "element 1 is not base64, as its content_type says: "
ORDERS = ["".join(letters) for letters in itertools.permutations("ndspc")]
FOR_BYTES = X + "the content_type base64 is for BYTES only, not for "


def keyed(order: str, **values: str) -> bytes:
    """Write a request of one input with its keys in this order, by their first letters."""
    given = {
        "name": '"x"',
        "datatype": '"BYTES"',
        "shape": "[2]",
        "parameters": '{"a":1,"content_type":"base64"}',
        "content": '["/9j/4A==",""]',  # the data
        **values,
    }
    keys = {key[0]: f'"{"data" if key == "content" else key}":{given[key]}' for key in given}
    return ('{"inputs":[{' + ",".join(keys[letter] for letter in order) + "}]}").encode()


@pytest.mark.parametrize("order", ORDERS)
def test_base64_is_decoded_wherever_the_content_type_stands(order: str) -> None:
    found = converted(keyed(order))
    assert found.tensors == [pack_bytes([b"\xff\xd8\xff\xe0", b""])]
    (entry,) = found.fields["inputs"]
    # The content type of the JSON data does not apply to the bytes.
    assert entry["parameters"] == {"a": 1, "binary_data_size": 12}
    assert outcome(strategies.bytewise(keyed(order)), work=False) == found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("data", ["[1,2]", '["AAAA","AAAA"]'])
def test_base64_is_for_bytes_only(order: str, data: str) -> None:
    found = outcome([keyed(order, datatype='"INT32"', content=data)])
    assert isinstance(found, Failed)
    seen_first = order.index("c") > max(order.index("d"), order.index("p"))
    if "A" not in data or seen_first:
        assert found == Failed(ErrorKind.BAD_REQUEST, FOR_BYTES + "INT32")
    assert outcome(strategies.bytewise(keyed(order, datatype='"INT32"', content=data))) == found


@pytest.mark.parametrize("content_type", ['"np"', '"str"', '"pd"', '"Base64"', "64", "null", "{}"])
def test_other_content_types_are_passed_through(content_type: str) -> None:
    parameters = f'{{"content_type":{content_type}}}'
    found = converted(keyed("ndspc", parameters=parameters, content='["YQ==","-"]'))
    assert found.tensors == [pack_bytes([b"YQ==", b"-"])]
    (entry,) = found.fields["inputs"]
    assert entry["parameters"]["content_type"] == json.loads(content_type)


def test_binary_bytes_inputs_are_not_decoded() -> None:
    parameters = '{"content_type":"base64","binary_data_size":9}'
    body = keyed("ndsp", parameters=parameters)
    found = converted(body)
    assert found.tensors == [9]
    assert found.fields["inputs"][0]["parameters"] == json.loads(parameters)
    body = keyed("ndsp", parameters='{"content_type":"base64","shared_memory_region":"r"}')
    assert "base64" in converted(body).header.decode()


def test_invalid_base64_is_refused() -> None:
    body = keyed("ndspc", content='["YQ==","YW-j"]')
    found = outcome([body])
    assert found == Failed(
        ErrorKind.BAD_REQUEST, NOT_BASE64 + "character 2 ('-') is not in the base64 alphabet"
    )
    assert outcome(strategies.bytewise(body), work=False) == found
    assert outcome([keyed("cpnds", content='["YQ==","YW-j"]')]) == found


def test_wrong_element_type_is_reported_before_invalid_base64() -> None:
    body = keyed("ndspc", content='["-",7]')
    assert outcome([body]) == Failed(
        ErrorKind.BAD_REQUEST, X + "element 1 (7) is not a string, as BYTES needs"
    )


@pytest.mark.parametrize("size", [0, 1, 2, 3, 49_149, 49_152, 49_153, 300_001])
def test_large_base64_elements_are_decoded(size: int) -> None:
    elements = [b"a", random.Random(size).randbytes(size), b"", bytes(40_000), b"bc"]
    texts = json.dumps([base64.b64encode(element).decode() for element in elements])
    body = keyed("ndspc", shape="[5]", content=texts)
    found = check_large(body)
    assert found.tensors == [pack_bytes(elements)]


def test_base64_is_decoded_in_steps() -> None:
    elements = [random.Random(0).randbytes(1_000_000), *[b"abc"] * 50_000]
    texts = json.dumps([base64.b64encode(element).decode() for element in elements])
    codec = InferRequestConverter(HEADER_CAP, DEPTH_CAP)
    codec.feed(keyed("ndspc", shape="[50001]", content=texts))
    codec.feed(b"", last=True)
    rounds, held, most = 0, codec.buffered_data_bytes, codec.buffered_data_bytes
    while codec.work():
        rounds += 1
        assert codec.buffered_data_bytes <= held + 8
        held = codec.buffered_data_bytes
    assert rounds > len(texts) / WINDOW
    (tensor,) = codec.finish().tensors
    assert not isinstance(tensor, int)
    assert b"".join(tensor) == pack_bytes(elements)
    assert codec.buffered_data_bytes == sum(map(len, tensor)) < most * 0.9


def test_outputs_requested_as_base64_are_recognised() -> None:
    outputs = [
        {"name": "y", "parameters": {"content_type": "base64", "a": 1}},
        {"name": "b", "parameters": {"content_type": "base64", "binary_data": True}},
        {"name": "s", "parameters": {"content_type": "base64", "shared_memory_region": "r"}},
        {"name": "o", "parameters": {"content_type": "np"}},
        {"name": "o", "parameters": {"content_type": "base64"}},
    ]
    fields = {**json.loads(keyed("ndspc")), "outputs": outputs}
    found = converted(json.dumps(fields).encode())
    # Of an output that is listed twice, the first counts.
    assert found.as_base64 == {"y", "s"}
    assert [entry["parameters"] for entry in found.fields["outputs"]] == [
        {"a": 1, "binary_data": True},
        {"content_type": "base64", "binary_data": True},
        {"content_type": "base64", "shared_memory_region": "r"},
        {"content_type": "np", "binary_data": True},
        {"binary_data": True},
    ]


# ---------------------------------------------------------------------------------- caps


def test_the_header_cap_does_not_count_data() -> None:
    body = request_body("INT8", "[9000]", json.dumps([1] * 9000))
    least = len(body) - len(json.dumps([1] * 9000)) + len("[0]")
    assert isinstance(outcome([body], header_cap=least), Accepted)
    for pieces in ([body], strategies.bytewise(body)):
        assert outcome(pieces, header_cap=least - 1) == Failed(
            ErrorKind.TOO_LARGE,
            f"the JSON around the data is larger than {least - 1} bytes (limits.header_bytes)",
        )


@pytest.mark.parametrize("depth_cap", [4, 5, 64, 200])
def test_depth_cap_applies(depth_cap: int) -> None:
    def body(data: int, header: int) -> bytes:
        array = "[" * data + "7" + "]" * data
        nest = "[" * (header - 3) + "]" * (header - 3)
        return request_body("INT8", "[1]", array, f'"z":{nest}')

    assert isinstance(outcome([body(depth_cap, depth_cap)], depth_cap=depth_cap), Accepted)
    assert outcome([body(depth_cap + 1, depth_cap)], depth_cap=depth_cap) == Failed(
        ErrorKind.BAD_REQUEST, X + f"data is nested deeper than {depth_cap}"
    )
    assert outcome([body(depth_cap, depth_cap + 1)], depth_cap=depth_cap) == Failed(
        ErrorKind.BAD_REQUEST, f"the request's JSON is nested deeper than {depth_cap}"
    )


def test_shape_of_many_dimensions_is_accepted() -> None:
    dimensions = 64
    ones = json.dumps([1] * dimensions)
    assert converted(request_body("INT8", ones, "[7]")).tensors == [b"\7"]
    found = outcome([request_body("INT8", json.dumps([9] * dimensions), "[7]")])
    assert isinstance(found, Failed)
    assert found.message.endswith("takes 9223372036854775808 elements, data has 1")


@pytest.mark.parametrize("digits", [100, 5000, 60_000])
@pytest.mark.parametrize("datatype", ["INT64", "UINT8", "FP64", "FP32", "BF16"])
def test_thousands_of_digits_are_converted_or_refused(datatype: str, digits: int) -> None:
    found = outcome([request_body(datatype, "[2]", "[1," + "7" * digits + "]")])
    if datatype == "FP64" and digits == 100:
        assert isinstance(found, Accepted)
    else:
        assert found == Failed(
            ErrorKind.BAD_REQUEST, X + f"element 1 ({'7' * QUOTED_NAME}...) does not fit {datatype}"
        )
    small = converted(request_body("FP64", "[1]", "[0." + "7" * digits + "]"))
    assert small.tensors == [pack("d", float("0." + "7" * digits))]


@pytest.mark.parametrize("exponent", ["308", "-324", "-400", "-99999", "-" + "9" * 5000])
def test_huge_exponents_are_converted_or_refused(exponent: str) -> None:
    text = f"1e{exponent}"
    assert converted(request_body("FP64", "[1]", f"[{text}]")).tensors == [pack("d", float(text))]
    text = f"1e{exponent.strip('-')}9"
    found = outcome([request_body("FP64", "[1]", f"[{text}]")])
    assert isinstance(found, Failed)
    assert found.message.endswith(") does not fit FP64")


# ---------------------------------------------------------------------------------- real sizes


def chunks(body: bytes, step: int) -> list[bytes]:
    return [body[i : i + step] for i in range(0, len(body), step)]


def check_large(body: bytes, steps: tuple[int, ...] = (65536, 50_001)) -> Accepted:
    found = converted(body)
    assert agrees(found, plain_outcome(body))
    for step in steps:
        assert outcome(chunks(body, step)) == found
    return found


UNITS = ["a", "é", "€", "😀", "\\n", "\\u00e9", "\\ud83d\\ude00", '\\"', "\\\\", "]", "\\u005b,"]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("before", range(0, 12, 3))
def test_long_strings_are_converted(unit: str, before: int) -> None:
    count = 205_000 // len(unit.encode())
    first, second = "x" * before + unit * count, unit * (count // 3) + "x"
    body = request_body("BYTES", "[4]", f'["a","{first}",["","{second}"]]')
    check_large(body)


@pytest.mark.parametrize("length", [*range(STRING_WINDOW - 14, STRING_WINDOW + 3), WINDOW])
def test_strings_as_long_as_a_window_are_converted(length: int) -> None:
    check_large(request_body("BYTES", "[2]", '["' + "a" * length + '" , "b"]'))
    check_large(request_body("BYTES", "[1]", '["' + "a" * length + '"]'), (65536,))


@pytest.mark.parametrize("shift", range(12))
@pytest.mark.parametrize("behind", [",\n    ", " ,", "\n}"])
def test_window_may_end_behind_the_array(shift: int, behind: str) -> None:
    rest = behind + '"shape":[32766]}]}' if "," in behind else behind + "]}"
    shape = "" if "," in behind else '"shape":[32766],'
    numbers = "[" + " " * shift + "1," * 32_765 + "1]"
    body = '{"inputs":[{"name":"x","datatype":"INT8",' + shape + '"data":' + numbers + rest
    check_large(body.encode(), (65536, 65535))


@pytest.mark.parametrize(
    "data",
    [
        "[1,2," + " " * 65_530 + ",3]",
        "[1,2,," + "1" * 65_530 + ",3]",
        "[1,[," + " " * 65_530 + "3]]",
        "[1,2,3," + " " * 65_530 + "]",
        "[" + "1," * 32_767 + "," + "1," * 32_767 + "1]",
        "[" + "1," * 32_767 + "]",
        '["a",' + '"b",' * 16_382 + "," + '"c"]',
        '["a",[' + "," + " " * 65_530 + '"c"]]',
    ],
)
@pytest.mark.parametrize("datatype", ["INT32", "FP32", "BYTES"])
def test_commas_at_the_edge_of_a_window_need_elements(datatype: str, data: str) -> None:
    found = outcome([request_body(datatype, "[3]", data)])
    assert isinstance(found, Failed)
    assert found.kind is ErrorKind.BAD_REQUEST


def test_half_a_surrogate_pair_in_a_long_string_is_refused() -> None:
    message = X + "element 1 is not a valid JSON string (no low surrogate in string)"
    for end in ("", "x", "x" * WINDOW):
        body = request_body("BYTES", "[2]", '["a","' + "é" * WINDOW + "\\ud83d" + end + '"]')
        for pieces in ([body], chunks(body, 999)):
            assert outcome(pieces) == Failed(ErrorKind.BAD_REQUEST, message)


def test_million_integers_are_converted() -> None:
    values = np.random.default_rng(0).integers(-(2**31), 2**31, 1_000_000).astype("<i4")
    body = request_body("INT32", "[1000,1000]", json.dumps(values.reshape(1000, 1000).tolist()))
    found = check_large(body)
    assert found.tensors == [values.tobytes()]


def test_million_floats_are_converted() -> None:
    values = np.random.default_rng(0).standard_normal(1_000_000)
    values[::251] = np.nan
    body = request_body("FP32", "[1000000]", json.dumps(values.tolist(), separators=(",", ":")))
    found = converted(body)
    assert found.tensors == [values.astype("<f4").tobytes()]
    assert outcome(chunks(body, 65536)) == found


def test_large_strings_in_small_reads_are_converted() -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices('a é😀"\\\n[],', k=rng.choice([0, 5, 900]))) for _ in range(300)]
    texts[7] = "".join(rng.choices('a é😀"\\\n', k=90_000))
    body = request_body("BYTES", "[300]", json.dumps(texts))
    found = check_large(body, (65536, 4099))
    assert found.tensors == [pack_bytes([text.encode() for text in texts])]
    body = request_body("BYTES", "[300]", json.dumps(texts, ensure_ascii=False))
    assert check_large(body).tensors == found.tensors


def test_more_than_a_window_byte_by_byte_is_converted() -> None:
    body = request_body("INT16", "[22000]", json.dumps(list(range(22_000))))
    assert len(body) > WINDOW
    assert outcome(strategies.bytewise(body)) == converted(body)
