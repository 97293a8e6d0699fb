"""Responses with JSON and binary outputs, whichever the client requested."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json.array_scanner import WINDOW
from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.response import encoded_converter, json_converter
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.messages import OutputEncoding
from tests.codec import strategies
from tests.codec.reference import DATATYPES, DTYPES, pack_bytes, unpack

CAP = 1 << 20
ALL = OutputEncoding(True, {})
NONE = OutputEncoding(False, {})
VALUES: dict[str, tuple[Any, ...]] = {
    "BOOL": (True, False),
    "BYTES": ("", "é", '"data":[', "x" * 300),
    **dict.fromkeys(("FP16", "BF16", "FP32", "FP64"), (0.5, -2.0, 3.0, math.nan)),
}


@dataclass(frozen=True)
class Output:
    """An output as the server sends it: in binary form, as JSON, or without data if it is empty.

    ``null`` writes NaN so, as KServe does.
    """

    name: str
    datatype: str
    values: tuple[Any, ...]
    binary: bool
    silent: bool = False
    null: bool = False

    @property
    def data(self) -> bytes:
        if self.datatype == "BYTES":
            return pack_bytes([value.encode() for value in self.values])
        return np.array(self.values, DTYPES[self.datatype]).tobytes()

    @property
    def shown(self) -> dict[str, Any]:
        fields = {"name": self.name, "datatype": self.datatype, "shape": [len(self.values)]}
        if self.silent and not self.values:
            return fields
        if self.binary:
            return {**fields, "parameters": {"binary_data_size": len(self.data)}}
        written = [None if self.null and value != value else value for value in self.values]
        return {**fields, "data": written}


def body_of(*outputs: Output) -> tuple[bytes, int]:
    header = json.dumps({"id": "7", "outputs": [each.shown for each in outputs]}).encode()
    return header + b"".join(each.data for each in outputs if each.binary), len(header)


def mixed(
    pieces: list[bytes], header_size: int, form: OutputEncoding, body_cap: int = CAP, **more: Any
) -> tuple[bytes, bytes]:
    codec = encoded_converter(header_size, form, JsonPolicies(**more), CAP, body_cap)
    for piece in pieces:
        codec.feed(piece)
        while codec.step():
            pass
    header, tensors = codec.finish()
    return header, b"".join(tensors)


def all_json(pieces: list[bytes], form: OutputEncoding) -> tuple[bytes, bytes]:
    codec = encoded_converter(None, form, JsonPolicies(), CAP, CAP)
    for piece in pieces:
        codec.feed(piece)
    codec.feed(b"", last=True)
    header, tensors = codec.finish()
    return header, b"".join(tensors)


def check(brought: tuple[bytes, bytes], outputs: list[Output], form: OutputEncoding) -> None:
    """Check that each output has its encoding, and the tensor that the server sent."""
    header, tail = brought
    fields = json.loads(header)
    assert fields["id"] == "7"
    for entry, output in zip(fields["outputs"], outputs, strict=True):
        size = entry.get("parameters", {}).get("binary_data_size")
        assert (size is not None) == form.wants_binary(output.name)
        assert ("data" in entry) != form.wants_binary(output.name)
        if size is None:
            elements = entry["data"]
        else:
            data, tail = tail[:size], tail[size:]
            elements = unpack(output.datatype, data)
            if output.datatype == "BYTES":
                elements = [each.decode() for each in elements]
        assert list(map(normal, elements)) == list(map(normal, output.values))
        assert entry["shape"] == [len(output.values)]
    assert tail == b""


def normal(value: Any) -> Any:
    return "NaN" if value is None or value != value else value


@st.composite
def outputs(draw: st.DrawFn) -> list[Output]:
    names = draw(st.lists(st.sampled_from(["y", "z", 'q"', "é"]), unique=True, max_size=4))
    made = []
    for name in names:
        datatype = draw(st.sampled_from(DATATYPES))
        element = st.sampled_from(VALUES.get(datatype, (0, 1, 100)))
        values = tuple(draw(st.lists(element, max_size=9)))
        made.append(Output(name, datatype, values, *(draw(st.booleans()) for _ in range(3))))
    return made


@strategies.LAW
@given(outputs(), st.sets(st.sampled_from(["y", "z", 'q"', "é"])), strategies.SEEDS)
def test_tensors_do_not_depend_on_the_servers_encoding(
    given_outputs: list[Output], binary: set[str], seed: int
) -> None:
    body, size = body_of(*given_outputs)
    form = OutputEncoding(False, dict.fromkeys(binary, True))
    found = mixed([body], size, form)
    check(found, given_outputs, form)
    assert mixed(strategies.cut(body, seed), size, form) == found
    assert mixed(strategies.bytewise(body), size, form) == found
    if len(body) == size:
        assert all_json([body], form) == found
        assert all_json(strategies.bytewise(body), form) == found


# ---------------------------------------------------------------------------------- tables

SUM = Output("SUM", "FP32", (1.5, math.nan), binary=False, null=True)
DIFFERENCE = Output("DIFFERENCE", "INT64", (2**53 + 1,), binary=True)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_output_without_elements_needs_no_data(datatype: str) -> None:
    empty = Output("e", datatype, (), binary=True, silent=True)
    body, size = body_of(empty, DIFFERENCE)
    for form in (ALL, NONE, OutputEncoding(False, {"e": True}), OutputEncoding(True, {"e": False})):
        check(mixed([body], size, form), [empty, DIFFERENCE], form)
    body, size = body_of(empty)
    for form in (ALL, NONE):
        check(all_json([body], form), [empty], form)
    codec = json_converter(size, JsonPolicies(as_base64=frozenset("e")), 1 << 24, 1 << 24)
    check((codec.text(body), b""), [empty], NONE)


def test_output_in_shared_memory_is_passed_through() -> None:
    for more in ({}, {"parameters": {"shared_memory_region": "r"}}):
        shape = [0 if more else 5]
        entry = {"name": "s", "datatype": "FP32", "shape": shape, **more}
        header = json.dumps({"outputs": [entry]}).encode()
        for form in (ALL, NONE):
            assert json.loads(all_json([header], form)[0])["outputs"] == [entry]
            assert json.loads(mixed([header], len(header), form)[0])["outputs"] == [entry]


def broken(data: str, shape: int = 2, datatype: str = "FP32") -> bytes:
    head = f'"name":"SUM","shape":[{shape}],"datatype":"{datatype}"'
    tail = json.dumps(DIFFERENCE.shown)
    return f'{{"outputs":[{{{head},"data":{data}}},{tail}]}}'.encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (broken("[, 1.0]"), "output 'SUM': data is not a valid JSON array, near element 0"),
        (broken("[1]"), "output 'SUM': shape [2] takes 2 elements, data has 1"),
        (
            broken("[1, 2]", 2, "FP7"),
            "output 'SUM' of the server's response has the unknown datatype",
        ),
        (broken("[1, 2]")[:-3], "the server's response is not valid JSON"),
    ],
)
def test_invalid_json_outputs_are_refused(header: bytes, message: str) -> None:
    body = header + DIFFERENCE.data
    for pieces in ([body], strategies.bytewise(body)):
        with pytest.raises(GatewayError) as caught:
            mixed(pieces, len(header), ALL)
        assert caught.value.kind is ErrorKind.BAD_RESPONSE
        assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    "data",
    [
        *("[, 1.0]", "[1.0, ]", "[1.0, , 2]", "[1 2]", "[1,NaNs]"),
        *("[" + "1," * count + "]" for count in range(9, 24)),  # at the end of a window
    ],
)
def test_json_outputs_must_be_valid_json(data: str) -> None:
    header, form = broken(data), OutputEncoding(False, {"DIFFERENCE": True})
    with strategies.windows_of(24), pytest.raises(GatewayError) as caught:
        mixed([header + DIFFERENCE.data], len(header), form)
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert caught.value.message == (
        "output 'SUM' of the server's response has data that are no JSON array"
    )


def test_empty_header_is_refused() -> None:
    for pieces in ([], [b"abcd"]):
        with pytest.raises(GatewayError) as caught:
            mixed(pieces, 0, ALL)
        assert caught.value.kind is ErrorKind.BAD_RESPONSE


def test_missing_binary_tensors_are_refused() -> None:
    header = json.dumps({"outputs": [DIFFERENCE.shown]}).encode()
    for form in (ALL, NONE):
        with pytest.raises(GatewayError) as caught:
            all_json([header], form)
        assert caught.value.kind is ErrorKind.BAD_RESPONSE
        assert "has 8 bytes, which do not follow its JSON" in caught.value.message


def test_large_json_output_is_converted_in_steps() -> None:
    """Even if the datatype follows the data, so that all of it is queued."""
    numbers = list(range(100_000))
    entry = {"data": numbers, "name": "y", "shape": [len(numbers)], "datatype": "INT32"}
    header = json.dumps({"outputs": [entry, DIFFERENCE.shown]}).encode()
    body = header + DIFFERENCE.data
    codec = encoded_converter(len(header), ALL, JsonPolicies(), CAP, CAP)
    codec.feed(body)
    steps = 0
    while codec.step():
        steps += 1
    assert steps > len(header) / WINDOW - 1
    tensors = b"".join(codec.finish()[1])
    assert tensors == np.array(numbers, "<i4").tobytes() + DIFFERENCE.data
