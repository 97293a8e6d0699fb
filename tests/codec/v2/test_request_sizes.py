from __future__ import annotations

import json
import random

import numpy as np
import pytest

from gateway.errors import ErrorKind
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
