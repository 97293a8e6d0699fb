"""The JSON part of responses, and what becomes of their bodies."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.dialects import JSON, KSERVE, TRITON, Dialect
from gateway.protocol.messages import (
    ALL_BINARY,
    ALL_JSON,
    InferResponseHead,
    OutputEncoding,
    OutputTensor,
)
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.protocol.response_header import (
    ResponseAction,
    choose_response_action,
    has_encoding,
    parse_response_header,
    read_outputs,
    read_response_head,
    reads_response,
    response_header_length,
)
from tests.protocol.headers import Fields, nested, tensor
from tests.support.checks.refused import refused

FP32, BYTES = DATATYPES["FP32"], DATATYPES["BYTES"]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (tensor(data=[1, 2]), OutputTensor("x", FP32, (2,), None)),
        (
            tensor(data=[1, 2], parameters={"a": 1}, more=[]),
            OutputTensor("x", FP32, (2,), None, {"a": 1}, {"more": []}),
        ),
        (tensor(parameters={"binary_data_size": 8}), OutputTensor("x", FP32, (2,), 8)),
        (tensor(shape=[3, 0]), OutputTensor("x", FP32, (3, 0), 0)),
        (tensor(shape=[0], data=[]), OutputTensor("x", FP32, (0,), None)),
        (
            tensor(shape=[0], parameters={"shared_memory_region": "r"}),
            OutputTensor("x", FP32, (0,), None, {"shared_memory_region": "r"}),
        ),
    ],
)
def test_output_is_read(entry: Fields, expected: OutputTensor) -> None:
    assert read_outputs({"outputs": [entry]}) == (expected,)


def test_null_parameters_count_as_absent() -> None:
    entry = {"name": "x", "datatype": "FP32", "shape": [2], "parameters": None, "data": [1, 2]}
    extra: Fields = {"parameters": None}
    assert read_outputs({"outputs": [entry]}) == (OutputTensor("x", FP32, (2,), extra=extra),)


def test_head_has_all_but_id_and_data() -> None:
    fields: Fields = {
        "model_name": "m",
        "model_version": None,
        "id": "7",
        "parameters": {"a": 1},
        "outputs": [tensor(data=[1, 2])],
        "more": {},
    }
    outputs = read_outputs(fields)
    extra: Fields = {"model_version": None, "more": {}}
    expected = InferResponseHead(outputs, "m", None, {"a": 1}, extra)
    assert read_response_head(fields, outputs) == expected


BINARY = {"binary_data_size": 8}


@pytest.mark.parametrize(
    ("entry", "as_binary", "as_json"),
    [
        (tensor(parameters=BINARY), True, False),
        (tensor(data=[1, 2]), False, True),
        (tensor(data=[1, 2], parameters=BINARY), False, False),
        (tensor(parameters={"shared_memory_region": "r"}), True, True),
        (tensor(shape=[0]), False, False),
        (tensor(shape=[0], parameters={"binary_data_size": 0}), True, False),
        (5, False, False),
    ],
)
def test_has_encoding_compares_outputs_with_the_requested_encoding(
    entry: Any, as_binary: bool, as_json: bool
) -> None:
    for binary, expected in ((True, as_binary), (False, as_json)):
        for form in (OutputEncoding(binary, {}), OutputEncoding(not binary, {"x": binary})):
            assert has_encoding({"outputs": [entry]}, form) is expected
            assert has_encoding({"outputs": [tensor(name="y"), entry]}, form) is expected


@pytest.mark.parametrize("fields", [{"outputs": None}, {"outputs": "x"}])
def test_invalid_outputs_have_no_encoding(fields: Fields) -> None:
    assert not has_encoding(fields, OutputEncoding(True, {}))


OUTPUTS = "outputs of the server's response must be an array of tensors, got"
FIRST, ITS = "outputs[0] of the server's response", "output 'x' of the server's response"
# The checks are those of inputs: test_request_header.py.
REFUSED_OUTPUTS = [
    ({"outputs": {}}, f"{OUTPUTS} an object"),
    ({"outputs": [5]}, f"{FIRST} must be an object, got 5"),
    ({"outputs": [{}]}, f"{FIRST}: name is missing"),
    (
        {"outputs": [tensor(parameters={"binary_data_size": 12})]},
        f"{ITS}: binary_data_size is 12, but shape [2] of FP32 takes 8 bytes",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED_OUTPUTS)
def test_invalid_output_is_a_502(fields: Fields, message: str) -> None:
    with refused(ErrorKind.BAD_RESPONSE, message):
        read_outputs(fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the server's response is not valid JSON"),
        (b'{"outputs": [', "the server's response is not valid JSON"),
        (b"[]", "the server's response must be a JSON object with outputs, got an array"),
        (nested(201), "the server's response is JSON nested deeper than 200"),
        (nested(100_000), "the server's response is JSON nested deeper than 1024"),
    ],
)
def test_invalid_response_is_a_502(text: bytes, message: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse_response_header(text)
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert caught.value.message.startswith(message)


def _headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


@pytest.mark.parametrize("cap", [None, 5])
def test_header_length_of_a_response_is_read(cap: int | None) -> None:
    assert response_header_length(_headers((HEADER_LENGTH, "5")), cap) == 5
    assert response_header_length(_headers(("X", "5")), cap) is None


@pytest.mark.parametrize(
    "values", [("x",), ("-1",), ("",), ("0",), ("1" * 20,), ("6",), ("1", "1")]
)
def test_invalid_or_too_large_header_length_of_a_response_is_a_502(values: tuple[str, ...]) -> None:
    with pytest.raises(GatewayError, match=r"JSON before the tensors|Content-Length") as caught:
        response_header_length(_headers(*((HEADER_LENGTH, value) for value in values)), 5)
    assert caught.value.kind is ErrorKind.BAD_RESPONSE


UNTOUCHED, FILL, WRITE_JSON = (
    ResponseAction.UNTOUCHED,
    ResponseAction.FILL,
    ResponseAction.WRITE_JSON,
)
ENCODE, UNLESS_FITTING = ResponseAction.ENCODE, ResponseAction.ENCODE_UNLESS_FITTING

MIXED = OutputEncoding(False, {"A": True, "B": False})
CAP = 10_000
LARGE = CAP + 1


def choose(
    dialect: Dialect,
    encoding: OutputEncoding,
    header_size: object = None,
    *,
    status: int = 200,
    any_base64: bool = False,
    coding: str | None = None,
) -> tuple[ResponseAction, int | None]:
    headers = {} if header_size is None else {HEADER_LENGTH: str(header_size)}
    if coding is not None:
        headers["Content-Encoding"] = coding
    made = CIMultiDictProxy(CIMultiDict(headers))
    return choose_response_action(status, made, dialect, encoding, any_base64, CAP)


@pytest.mark.parametrize(
    ("dialect", "encoding", "header_size", "action"),
    [
        (TRITON, ALL_BINARY, 5, UNTOUCHED),
        (TRITON, ALL_BINARY, None, FILL),
        (TRITON, ALL_JSON, 5, WRITE_JSON),
        (TRITON, ALL_JSON, None, FILL),
        (TRITON, MIXED, 5, ENCODE),
        (KSERVE, ALL_BINARY, 5, UNLESS_FITTING),
        (KSERVE, ALL_BINARY, LARGE, ENCODE),
        (KSERVE, ALL_JSON, 5, WRITE_JSON),
        (KSERVE, ALL_JSON, LARGE, ENCODE),
        (KSERVE, MIXED, 5, UNLESS_FITTING),
        (JSON, ALL_JSON, None, UNTOUCHED),
        (JSON, ALL_BINARY, None, ENCODE),
    ],
)
def test_action_depends_on_dialect_encoding_and_header_length(
    dialect: Dialect, encoding: OutputEncoding, header_size: int | None, action: ResponseAction
) -> None:
    size = None if action is UNTOUCHED else header_size
    assert choose(dialect, encoding, header_size) == (action, size)
    assert choose(dialect, encoding, header_size, status=400) == (UNTOUCHED, None)


@pytest.mark.parametrize("dialect", [KSERVE, JSON])
def test_json_is_read_if_its_text_becomes_base64(dialect: Dialect) -> None:
    assert choose(dialect, ALL_JSON, any_base64=True) == (ENCODE, None)


@pytest.mark.parametrize("dialect", [TRITON, KSERVE, JSON])
def test_response_is_touched_only_if_the_gateway_reads_it(dialect: Dialect) -> None:
    for encoding, any_base64 in product((ALL_BINARY, ALL_JSON, MIXED), (False, True)):
        untouched = not reads_response(dialect, encoding, any_base64)
        found, _ = choose(dialect, encoding, 5, any_base64=any_base64)
        assert (found is UNTOUCHED) is untouched
        if untouched:
            coded = choose(dialect, encoding, any_base64=any_base64, coding="gzip")
            assert coded == (UNTOUCHED, None)
