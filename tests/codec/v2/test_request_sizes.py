from __future__ import annotations

import json
import random

import numpy as np
import pytest

from gateway.errors import ErrorKind
from tests.codec import strategies
from tests.codec.reference import pack_bytes
from tests.codec.v2.infer_requests import (
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
    body = request_body("INT32", "[40000]", json.dumps(list(range(40_000))))
    assert len(body) > WINDOW
    assert outcome(strategies.bytewise(body)) == converted(body)
