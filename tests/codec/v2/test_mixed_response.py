"""Responses with JSON outputs, or silent ones, beside binary ones: see also test_response.py."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gateway.codec.json.array_scanner import WINDOW
from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.response import encoded_converter, json_converter
from gateway.errors import ErrorKind
from gateway.protocol.messages import OutputEncoding
from tests.codec import strategies
from tests.codec.reference import DATATYPES
from tests.codec.strategies import Output, output, response_body
from tests.codec.v2.infer_requests import Failed
from tests.codec.v2.infer_responses import ALL, Converted, as_mixed, convert_response

NONE = OutputEncoding(False, {})
BOTH = pytest.mark.parametrize("form", [ALL, NONE], ids=["all binary", "all JSON"])
BINARY = output("z", "INT64", [1], (2**53 + 1).to_bytes(8, "little"))


@pytest.mark.parametrize("form", [ALL, NONE, OutputEncoding(True, {"e": False})])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_output_without_elements_needs_no_data(datatype: str, form: OutputEncoding) -> None:
    silent = Output("e", {"name": "e", "datatype": datatype, "shape": [0]}, b"")

    def check(header: bytes) -> None:
        entry = json.loads(header)["outputs"][0]
        size = entry.get("parameters", {}).get("binary_data_size")
        assert (entry.get("data"), size) == ((None, 0) if form.wants_binary("e") else ([], None))

    body, size = response_body([silent, BINARY])
    found = as_mixed([body], size, form)
    assert isinstance(found, tuple)
    check(found[0])
    body, size = response_body([silent])
    alone = convert_response([body], form)
    assert isinstance(alone, Converted)
    check(alone.header)
    if form is NONE:
        codec = json_converter(size, JsonPolicies(as_base64=frozenset("e")), 1 << 24, 1 << 24)
        check(codec.text(body))


@BOTH
@pytest.mark.parametrize("more", [{"shape": [5]}, {"parameters": {"shared_memory_region": "r"}}])
def test_output_in_shared_memory_is_passed_through(
    more: dict[str, object], form: OutputEncoding
) -> None:
    entry = {"name": "s", "datatype": "FP32", "shape": [0], **more}
    header = json.dumps({"outputs": [entry]}).encode()
    alone = convert_response([header], form)
    assert isinstance(alone, Converted)
    assert alone.outputs == [entry]
    found = as_mixed([header], len(header), form)
    assert isinstance(found, tuple)
    assert json.loads(found[0])["outputs"] == [entry]


def broken(data: str, shape: int = 2, datatype: str = "FP32") -> bytes:
    head = f'"name":"y","shape":[{shape}],"datatype":"{datatype}"'
    return f'{{"outputs":[{{{head},"data":{data}}},{json.dumps(BINARY.shown)}]}}'.encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (broken("[, 1.0]"), "output 'y': data is not a valid JSON array, near element 0"),
        (broken("[1]"), "output 'y': shape [2] takes 2 elements, data has 1"),
        (
            broken("[1, 2]", 2, "FP7"),
            "output 'y' of the server's response: unknown datatype",
        ),
        (broken("[1, 2]")[:-3], "the server's response is not valid JSON"),
        (b"", "the server's response is not valid JSON"),
    ],
)
def test_invalid_json_outputs_are_refused(header: bytes, message: str) -> None:
    body = header + BINARY.data
    for pieces in ([body], strategies.bytewise(body)):
        found = as_mixed(pieces, len(header), ALL)
        assert isinstance(found, Failed)
        assert found.kind is ErrorKind.BAD_RESPONSE
        assert found.message.startswith(message)


@pytest.mark.parametrize(
    "data",
    [
        *("[, 1.0]", "[1.0, ]", "[1.0, , 2]", "[1 2]", "[1,NaNs]"),
        *("[" + "1," * count + "]" for count in range(9, 24)),  # at the end of a window
    ],
)
def test_json_outputs_must_be_valid_json(data: str) -> None:
    header, form = broken(data), OutputEncoding(False, {"z": True})
    with strategies.windows_of(24):
        assert as_mixed([header + BINARY.data], len(header), form) == Failed(
            ErrorKind.BAD_RESPONSE,
            "output 'y' of the server's response has data that are no JSON array",
        )


@BOTH
def test_missing_binary_tensors_are_refused(form: OutputEncoding) -> None:
    header, _ = response_body([Output("z", BINARY.shown, b"")])
    found = convert_response([header], form)
    assert isinstance(found, Failed)
    assert found.kind is ErrorKind.BAD_RESPONSE
    assert "has 8 bytes, which do not follow its JSON" in found.message


def test_large_json_output_is_converted_in_steps() -> None:
    """Even if the datatype follows the data, so that all of it is queued."""
    numbers = list(range(100_000))
    entry = {"data": numbers, "name": "y", "shape": [len(numbers)], "datatype": "INT32"}
    body, size = response_body([Output("y", entry, b""), BINARY])
    codec = encoded_converter(size, ALL, JsonPolicies(), 1 << 20, 1 << 20)
    codec.feed(body)
    steps = 0
    while codec.step():
        steps += 1
    assert steps > size / WINDOW - 1
    assert b"".join(codec.finish()[1]) == np.array(numbers, "<i4").tobytes() + BINARY.data
