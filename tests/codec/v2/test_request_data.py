from __future__ import annotations

import base64
import itertools
import json
import random

import numpy as np
import pytest

from gateway.codec.v2.request import InferRequestReader
from gateway.errors import ErrorKind
from tests.codec import strategies
from tests.codec.reference import pack_bytes
from tests.codec.v2.infer_requests import (
    DEPTH_CAP,
    HEADER_CAP,
    STRING_WINDOW,
    WINDOW,
    Failed,
    X,
    check_large,
    chunks,
    converted,
    outcome,
    request_body,
)

UNITS = ["a", "é", "€", "😀", "\\n", "\\u00e9", "\\ud83d\\ude00", '\\"', "\\\\", "]", "\\u005b,"]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("before", [0, 5])
def test_long_strings_are_converted(unit: str, before: int) -> None:
    count = 205_000 // len(unit.encode())
    first, second = "x" * before + unit * count, unit * (count // 3) + "x"
    body = request_body("BYTES", "[4]", f'["a","{first}",["","{second}"]]')
    check_large(body)


@pytest.mark.parametrize("length", [*range(STRING_WINDOW - 14, STRING_WINDOW + 3), WINDOW])
def test_strings_as_long_as_a_window_are_converted(length: int) -> None:
    check_large(request_body("BYTES", "[2]", '["' + "a" * length + '" , "b"]'))
    check_large(request_body("BYTES", "[1]", '["' + "a" * length + '"]'), (65536,))


def test_half_a_surrogate_pair_in_a_long_string_is_refused() -> None:
    message = X + "element 1 is not a valid JSON string (no low surrogate in string)"
    for end in ("", "x", "x" * WINDOW):
        body = request_body("BYTES", "[2]", '["a","' + "é" * WINDOW + "\\ud83d" + end + '"]')
        for pieces in ([body], chunks(body, 999)):
            assert outcome(pieces) == Failed(ErrorKind.BAD_REQUEST, message)


def test_many_numbers_are_converted() -> None:
    rng = np.random.default_rng(0)
    integers = rng.integers(-(2**31), 2**31, 90_000).astype("<i4")
    body = request_body("INT32", "[300,300]", json.dumps(integers.reshape(300, 300).tolist()))
    assert check_large(body).tensors == [integers.tobytes()]
    floats = rng.standard_normal(90_000)
    floats[::251] = np.nan
    body = request_body("FP32", "[90000]", json.dumps(floats.tolist(), separators=(",", ":")))
    assert converted(body).tensors == [floats.astype("<f4").tobytes()]
    assert outcome(chunks(body, 65536)) == converted(body)


def test_large_strings_in_small_reads_are_converted() -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices('a é😀"\\\n[],', k=rng.choice([0, 5, 900]))) for _ in range(300)]
    texts[7] = "".join(rng.choices('a é😀"\\\n', k=90_000))
    body = request_body("BYTES", "[300]", json.dumps(texts))
    found = check_large(body, (65536, 4099))
    assert found.tensors == [pack_bytes([text.encode() for text in texts])]
    body = request_body("BYTES", "[300]", json.dumps(texts, ensure_ascii=False))
    assert check_large(body).tensors == found.tensors


NOT_BASE64 = X + "element 1 is not base64, as its content_type says: "

ORDERS = [
    form.format(*letters)
    for letters in itertools.permutations("dpc")  # name and shape matter less
    for form in ("ns{}{}{}", "{}{}s{}n")
]

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
def test_base64_is_for_bytes_only(order: str) -> None:
    seen_first = order.index("c") > max(order.index("d"), order.index("p"))
    for data in ("[1,2]", '["AAAA","AAAA"]'):
        body = keyed(order, datatype='"INT32"', content=data)
        found = outcome([body])
        assert isinstance(found, Failed)
        if "A" not in data or seen_first:
            assert found == Failed(ErrorKind.BAD_REQUEST, FOR_BYTES + "INT32")
        assert outcome(strategies.bytewise(body)) == found


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
    codec = InferRequestReader(HEADER_CAP, DEPTH_CAP)
    codec.feed(keyed("ndspc", shape="[50001]", content=texts))
    codec.feed(b"", last=True)
    rounds, held, most = 0, codec.buffered_data_bytes, codec.buffered_data_bytes
    while codec.step():
        rounds += 1
        assert codec.buffered_data_bytes <= held + 8
        held = codec.buffered_data_bytes
    assert rounds > len(texts) / WINDOW
    (tensor,) = codec.finish().tensors
    assert not isinstance(tensor, int)
    assert b"".join(tensor) == pack_bytes(elements)
    assert codec.buffered_data_bytes == sum(map(len, tensor)) < most * 0.9
