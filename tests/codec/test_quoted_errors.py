"""Errors quote what was sent, and name its offset, however the text arrived."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.codec.v2.request import read_json_fast, read_without_data
from gateway.errors import GatewayError
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.response_header import parse_response_header
from tests.codec import strategies
from tests.codec.reference_v1 import Declared
from tests.codec.v1 import predict_requests
from tests.codec.v2 import conversions
from tests.codec.v2.conversions import Failed, outcome
from tests.support.scale import scaled

CAP, DEPTH = 10_000, 64

_PLACED = re.compile(r" at byte ([0-9]+)\)?, near: (.*)\Z", re.DOTALL)
_ELEMENT = re.compile(r": element [0-9]+ \((.*)\) (?:is not|does not|holds)", re.DOTALL)

Convert = Callable[[list[bytes]], object]


def convert_request(pieces: list[bytes]) -> object:
    return outcome(pieces, work=False, header_cap=CAP, depth_cap=DEPTH)


def convert_response(pieces: list[bytes]) -> object:
    form = OutputEncoding(True, {"text": False})
    return conversions.convert_response(pieces, form, work=False, header_cap=CAP)


def convert_v1(pieces: list[bytes]) -> object:
    return _predict(pieces, {"x": ("FP32", [-1]), "t": ("BYTES", [-1])})


def convert_v1_of_one(pieces: list[bytes]) -> object:
    return _predict(pieces, predict_requests.TEXT)


def _predict(pieces: list[bytes], declared: Declared) -> Failed | None:
    try:
        predict_requests.convert(pieces, declared)
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return None


def refusal(convert: Convert, body: bytes) -> Failed | None:
    """Return the error of a body; it must be the same however the body arrives."""
    found = convert([body])
    for pieces in (strategies.bytewise(body), strategies.cut(body, 1), strategies.cut(body, 2)):
        assert convert(pieces) == found
    return found if isinstance(found, Failed) else None


def check_quotes(message: str, body: bytes) -> None:
    """Check that what a message quotes was sent at the offset that it names."""
    sent = body.decode("utf-8", "backslashreplace")
    if (element := _ELEMENT.search(message)) is not None:
        assert element[1].removesuffix("...") in sent
    placed = _PLACED.search(message)
    if placed is None:
        assert "near: " not in message
        return
    place = int(placed[1])
    assert place <= len(body)
    where = len(body[:place].decode("utf-8", "backslashreplace"))
    parts = [re.escape(part) for part in placed[2].split("[…]")]
    found = [
        match
        for gap in (r"\[.*?\]", r"\[.*\]")
        for start in range(where + 1)
        if (match := re.compile(gap.join(parts), re.DOTALL).match(sent, start))
    ]
    assert any(match.start() <= where <= match.end() for match in found), (message, sent)


# Dimensions and numbers have two digits, so that no array looks like a placeholder.
def _tensor(name: str, datatype: str, data: list[Any], **more: Any) -> dict[str, Any]:
    shape = [20]
    return {"name": name, **more, "datatype": datatype, "shape": shape, "data": data}


NUMBERS = [*range(20, 40)]
STRINGS = ["é", '"]', "\\", "{", "data", "zz", "yy", "xx", "ww", "v" * 60]
TENSORS = [
    _tensor("x", "FP32", NUMBERS, parameters={"note": '"data":[99]'}),
    _tensor("text", "BYTES", STRINGS * 2),
    _tensor("é", "INT64", [NUMBERS[:10], NUMBERS[10:]], last=None),
]
GOOD: dict[Convert, list[dict[str, Any]]] = {
    convert_request: [{"id": "é", "inputs": TENSORS}, {"inputs": TENSORS[:1], "outputs": []}],
    convert_response: [{"model_name": "m", "outputs": TENSORS, "id": None}],
    convert_v1: [
        {"instances": [{"x": 20, "t": "é"}, {"t": {"b64": "YWE="}, "x": 30}], "parameters": {}},
        {"parameters": {"a": ['"', 1.5]}, "inputs": {"t": STRINGS, "x": NUMBERS}},
    ],
    convert_v1_of_one: [{"inputs": STRINGS, "x": {"y": 1}}, {"instances": [{"b64": "YQ=="}, "é"]}],
}
TEXTS = [
    (convert, json.dumps(fields, ensure_ascii=False, indent=indent).encode())
    for convert, goods in GOOD.items()
    for fields in goods
    for indent in (None, 1)
]
CRUMBS = [
    *(bytes([code]) for code in b'"{}[]:,\\0-.enNt \n\x00\xff\x80\xc3'),
    b'"data":[55]',
    b"NaN",
    b'{"a":1}',
    "é".encode(),
    b"[[",
    b'"inputs":',
]


@pytest.mark.parametrize(("convert", "body"), TEXTS)
def test_valid_bodies_are_accepted(convert: Convert, body: bytes) -> None:
    # V1 shapes follow the data; this model wants one dimension.
    error = refusal(convert, body)
    assert error is None


@settings(max_examples=scaled(1500))
@given(st.sampled_from(TEXTS), st.integers(0, 2**20), st.integers(0, 12), st.sampled_from(CRUMBS))
@example(TEXTS[0], 2**20, 0, b"x")
def test_error_quotes_a_broken_body_where_it_breaks(
    good: tuple[Convert, bytes], at: int, lost: int, put: bytes
) -> None:
    convert, body = good
    at %= len(body) + 1
    body = body[:at] + put + body[at + lost :]
    error = refusal(convert, body)
    if error is None:
        return
    check_quotes(error.message, body)
    if convert is convert_request:
        assert read_json_fast(body, DEPTH) is None


@settings(max_examples=scaled(300))
@given(st.sampled_from(TEXTS), st.integers(0, 2**20))
def test_error_quotes_a_truncated_body_at_its_end(good: tuple[Convert, bytes], size: int) -> None:
    convert, body = good
    body = body[: size % len(body)].rstrip()
    error = refusal(convert, body)
    assert error is not None
    check_quotes(error.message, body)


def test_error_quotes_a_cached_header() -> None:
    good = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2]%b}]}'
    part = good % b',"parameters":{"binary_data_size":8 8}'
    for read in (partial(read_without_data, depth_cap=DEPTH), parse_response_header):
        with pytest.raises(GatewayError, match=r"at byte 88\)") as caught:
            read(part)
        check_quotes(caught.value.message, part)
