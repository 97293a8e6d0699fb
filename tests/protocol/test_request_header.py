from __future__ import annotations

import json

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import (
    InferRequestHead,
    InputTensor,
    OutputEncoding,
    RequestedOutput,
    RequestFeatures,
)
from gateway.protocol.request_header import (
    HEADER_LENGTH,
    header_length,
    parse_request_header,
    read_head,
    read_inputs,
    read_output_encoding,
    requests_binary_explicitly,
)
from tests.protocol.headers import Fields, nested, tensor
from tests.support.checks.refused import refused, refused_with

FP32, BYTES = DATATYPES["FP32"], DATATYPES["BYTES"]
REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


# ---------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize("depth", [2, 3, 9])
def test_nesting_up_to_the_limit_is_parsed(depth: int) -> None:
    assert set(parse_request_header(nested(depth), depth)) == {"x"}


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, nested(100_000)])
def test_nesting_100_000_deep_is_refused(text: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        parse_request_header(text, 64)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert len(caught.value.message) < 200


def test_brackets_in_strings_and_siblings_are_no_nesting() -> None:
    text = json.dumps({"x": "[{" * 500, "y": [[]] * 500})
    assert parse_request_header(text.encode(), 3)["y"] == [[]] * 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the request is not valid JSON"),
        (b'{"inputs": [}', 'near: {"inputs": [}'),
        (b'{"a": "\xff"}', "the request is not valid JSON"),
        (b'{"a": "\\ud800"}', "the request is not valid JSON"),
        (b"\xef\xbb\xbf{}", "the request is not valid JSON"),
        (b"[]", "the request must be a JSON object with inputs, got an array"),
    ],
)
def test_invalid_header_is_refused(text: bytes, message: str) -> None:
    with refused_with(ErrorKind.BAD_REQUEST, message):
        parse_request_header(text, 64)


# ---------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (tensor(data=0), InputTensor("x", FP32, (2,), base64=False)),
        (tensor(parameters={"binary_data_size": 8}), InputTensor("x", FP32, (2,), 8)),
        (
            tensor(parameters={"binary_data_size": 2**63 - 1}, datatype="BYTES"),
            InputTensor("x", BYTES, (2,), 2**63 - 1),
        ),
        (tensor(parameters=REGION), InputTensor("x", FP32, (2,), parameters=REGION)),
    ],
)
def test_input_is_read(entry: Fields, expected: InputTensor) -> None:
    assert read_inputs({"id": "7", "inputs": [entry]}) == (expected,)


REFUSED_FIELDS = [
    ({"inputs": [], "id": 7}, "id must be a string, got 7"),
    ({}, "inputs is missing; it must be an array of tensors"),
    (
        {"instances": [1], "inputs_": []},
        "inputs is missing; the request has instances, as in the V1 protocol: "
        "send such a request to /v1/models/MODEL:predict",
    ),
    ({"inputs": None}, "inputs must be an array of tensors, got null"),
    ({"inputs": [tensor(data=0), 5]}, "inputs[1] must be an object, got 5"),
    ({"inputs": [tensor(name=None)]}, "inputs[0]: name is missing"),
    ({"inputs": [tensor(name=5)]}, "inputs[0]: name must be a string, got 5"),
]
SOURCES = "needs exactly one of data, binary_data_size and shared_memory_region; it has "
TWO_SOURCES = {"shared_memory_region": "", "binary_data_size": 8}
REFUSED_INPUTS = [
    (tensor(datatype=5), 'datatype must be a string such as "FP32", got 5'),
    (tensor(datatype="FP8"), 'unknown datatype "FP8"; known are'),
    (tensor(shape=None), "shape is missing"),
    (tensor(shape=2), "shape must be an array of integers, got 2"),
    (tensor(shape=[-1]), "shape [-1] must hold integers of 0 or more"),
    (tensor(shape=[1] * 65), "shape has 65 dimensions; at most 64 are allowed"),
    (tensor(data=0, parameters=[]), "parameters must be an object"),
    (tensor(), "data is missing, and there is neither binary_data_size nor shared_memory_region"),
    (tensor(data=0, parameters={"binary_data_size": 8}), f"{SOURCES}data and binary_data_size"),
    (tensor(data=0, parameters=TWO_SOURCES), f"{SOURCES}data and binary_data_size and shared_mem"),
    (
        tensor(parameters={"binary_data_size": 7}),
        "binary_data_size is 7, but shape [2] of FP32 takes 8 bytes",
    ),
    *(
        (
            tensor(parameters={"binary_data_size": size}, datatype="BYTES"),
            f"binary_data_size must be an integer of 0 or more, got {shown}",
        )
        for size, shown in [(-1, "-1"), (8.0, "8.0"), (True, "true"), ("8", '"8"'), (2**63, 2**63)]
    ),
]


def _check_refused(fields: Fields, message: str) -> None:
    with pytest.raises(GatewayError) as caught:
        read_inputs(fields)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.message.startswith(message)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(("fields", "message"), REFUSED_FIELDS)
def test_invalid_inputs_are_refused(fields: Fields, message: str) -> None:
    _check_refused(fields, message)


@pytest.mark.parametrize(("entry", "message"), REFUSED_INPUTS)
def test_invalid_input_is_named(entry: Fields, message: str) -> None:
    separator = " " if message.startswith(SOURCES) else ": "
    _check_refused({"inputs": [entry]}, f"input 'x'{separator}{message}")


# ---------------------------------------------------------------------------------- output encoding


def outputs(*parameters: Fields | None) -> list[Fields]:
    return [
        {"name": f"out{i}"} | ({} if p is None else {"parameters": dict(p)})
        for i, p in enumerate(parameters)
    ]


ON, OFF = {"binary_data": True}, {"binary_data": False}
DEFAULT_ON, DEFAULT_OFF = {"binary_data_output": True}, {"binary_data_output": False}

FORMS = [
    # fields, wanted in binary: out0, out1; all in binary, all in JSON
    ({}, False, False, False, True),
    ({"outputs": outputs(ON, None)}, True, False, False, False),
    ({"outputs": outputs(OFF, OFF), "parameters": DEFAULT_ON}, False, False, False, True),
    # KServe's extension: an output's parameter overrides the request's.
    ({"outputs": outputs(None, OFF), "parameters": DEFAULT_ON}, True, False, False, False),
    ({"outputs": outputs({"classification": 3}, ON)}, False, True, False, False),
]


@pytest.mark.parametrize(("fields", "first", "second", "all_binary", "all_json"), FORMS)
def test_requested_encoding_of_each_output_is_read(
    fields: Fields, first: bool, second: bool, all_binary: bool, all_json: bool
) -> None:
    form = read_output_encoding(fields)
    assert (form.wants_binary("out0"), form.wants_binary("out1")) == (first, second)
    assert (form.all_binary, form.all_json) == (all_binary, all_json)


BASE64 = {"content_type": "base64"}


@pytest.mark.parametrize(
    ("fields", "as_base64"),
    [
        ({"outputs": outputs(BASE64, None)}, {"out0"}),
        ({"outputs": outputs(ON | BASE64, BASE64)}, {"out1"}),
        ({"outputs": outputs(BASE64, OFF | BASE64), "parameters": DEFAULT_ON}, {"out1"}),
        ({"outputs": [*outputs(None), *outputs(BASE64)]}, set()),
    ],
)
def test_outputs_requested_in_base64_are_read(fields: Fields, as_base64: set[str]) -> None:
    assert read_output_encoding(fields).as_base64 == as_base64


REFUSED_FORMS = [
    ({"parameters": []}, "the request: parameters must be an object, got an array"),
    (
        {"parameters": {"binary_data_output": 1}},
        "the request: binary_data_output must be true or false, got 1",
    ),
    (
        {"outputs": [{"name": "y", "parameters": 1}]},
        "output 'y': parameters must be an object, got 1",
    ),
    (
        {"outputs": [{"name": "y", "parameters": {"binary_data": "true"}}]},
        "output 'y': binary_data must be true or false, got \"true\"",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED_FORMS)
def test_invalid_output_encoding_is_refused(fields: Fields, message: str) -> None:
    with refused(ErrorKind.BAD_REQUEST, message):
        read_output_encoding(fields)


@pytest.mark.parametrize(
    ("fields", "explicit"),
    [
        ({}, False),
        ({"parameters": DEFAULT_ON}, True),
        ({"outputs": outputs(None), "parameters": DEFAULT_ON}, False),
        ({"outputs": outputs(None, OFF, ON)}, False),
        ({"outputs": outputs(ON, ON)}, True),
        ({"outputs": outputs({"shared_memory_region": "r"}, ON)}, True),
    ],
)
def test_explicit_request_for_binary_outputs_is_recognized(fields: Fields, explicit: bool) -> None:
    assert requests_binary_explicitly(fields) is explicit


# ---------------------------------------------------------------------------------- base64


def test_base64_is_only_for_bytes() -> None:
    with pytest.raises(GatewayError) as caught:
        read_inputs({"inputs": [tensor(data=[], parameters=BASE64)]})
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    assert caught.value.message == (
        "input 'x': the content_type base64 is for BYTES only, not for FP32"
    )


@pytest.mark.parametrize(
    ("entry", "base64", "parameters"),
    [
        (tensor(datatype="BYTES", data=["YQ=="], parameters={"a": 1} | BASE64), True, {"a": 1}),
        (tensor(datatype="BYTES", data=["YQ=="], parameters={"content_type": "np"}), False, None),
        (tensor(datatype="BYTES", parameters=BASE64 | {"binary_data_size": 8}), None, BASE64),
        (tensor(parameters={"a": 1, "shared_memory_region": "r"}), None, None),
    ],
)
def test_base64_is_recognized_and_parameters_of_the_form_are_removed(
    entry: Fields, base64: bool | None, parameters: Fields | None
) -> None:
    (found,) = read_inputs({"inputs": [entry]})
    assert found.base64 is base64
    assert found.parameters == (entry["parameters"] if parameters is None else parameters)


def test_head_has_all_but_id_and_data() -> None:
    fields = {
        "id": "7",
        "inputs": [tensor(data=0, more=[1])],
        "outputs": [{"name": "y", "parameters": ON | {"classification": 2}, "z": 1}],
        "parameters": DEFAULT_OFF | {"priority": 2},
        "model_name": "m",
    }
    head = read_head(fields, read_inputs(fields))
    assert head == InferRequestHead(
        (InputTensor("x", FP32, (2,), base64=False, extra={"more": [1]}),),
        (RequestedOutput("y", {"classification": 2}, {"z": 1}),),
        {"priority": 2},
        {"model_name": "m"},
        OutputEncoding(False, {"y": True}),
        RequestFeatures(("y",)),
    )


@pytest.mark.parametrize(
    ("values", "length"), [((), None), (("0",), 0), (("007",), 7), (("9" * 19,), int("9" * 19))]
)
def test_header_length_is_read(values: tuple[str, ...], length: int | None) -> None:
    headers = CIMultiDictProxy(CIMultiDict((HEADER_LENGTH, value) for value in values))
    assert header_length(headers) == length


@pytest.mark.parametrize(
    "values",
    [*zip(("", "-1", "1.0", "0x1", "1 2", "1,2", "96abc", "٣", "9" * 20, "1\n")), ("1", "1")],
)
def test_invalid_header_length_is_refused(values: tuple[str, ...]) -> None:
    headers = CIMultiDictProxy(CIMultiDict((HEADER_LENGTH, value) for value in values))
    with refused_with(ErrorKind.BAD_REQUEST, f"{HEADER_LENGTH} must be one number"):
        header_length(headers)
