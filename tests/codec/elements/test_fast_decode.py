from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.build_info import NATIVE
from gateway.codec.elements.fast_decode import PARSE_ERRORS, fast_decode_numbers, parse_numbers
from gateway.protocol.datatypes import DATATYPES, Family
from tests.codec.exact_rounding import nearest

INTEGERS = [name for name, each in DATATYPES.items() if each.family is Family.INTEGER]
FLOATS = [name for name, each in DATATYPES.items() if each.family is Family.FLOAT]


def converted(text: bytes, datatype: str) -> bytes | None:
    return fast_decode_numbers(text, DATATYPES[datatype])


def limits(datatype: str) -> tuple[int, int]:
    dtype = DATATYPES[datatype].dtype
    assert dtype is not None
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_up_to_their_limits_are_decoded(datatype: str) -> None:
    dtype, (least, most) = DATATYPES[datatype].dtype, limits(datatype)
    values = [[least, 0], [], [[1, most]]]
    assert converted(json.dumps(values).encode(), datatype) == (
        np.array([least, 0, 1, most], dtype).tobytes()
    )
    for beyond in (least - 1, most + 1):
        assert converted(b"[0, %d]" % beyond, datatype) is None


@pytest.mark.parametrize("text", [b"[1.0]", b"[1e2]", b"[true]", b'["1"]', b"[null]", b"[1,]"])
def test_text_without_plain_integers_is_left_to_the_slow_path(text: bytes) -> None:
    assert {converted(text, datatype) for datatype in INTEGERS} == {None}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.sampled_from(FLOATS))
def test_floats_are_rounded_unless_one_becomes_infinity(values: list[float], datatype: str) -> None:
    expected = [nearest(repr(value), datatype) for value in values]
    data = converted(json.dumps(values).encode(), datatype)
    assert data == (None if None in expected else b"".join(each or b"" for each in expected))


@pytest.mark.parametrize(
    "text", [b"[1e400]", b"[-NaN]", b"[nan]", b"[01]", b"[1][2]", b"[{}]", b"[.5]", b"[1"]
)
def test_text_without_plain_floats_is_left_to_the_slow_path(text: bytes) -> None:
    assert {converted(text, datatype) for datatype in FLOATS} == {None}


@pytest.mark.parametrize("datatype", FLOATS)
def test_nan_and_infinity_are_left_to_the_slow_path_unless_compiled(datatype: str) -> None:
    for text, value in ((b"NaN", np.nan), (b"Infinity", np.inf), (b"-Infinity", -np.inf)):
        read = np.array([1, value], DATATYPES[datatype].dtype)
        assert converted(b"[1, %b]" % text, datatype) == (read.tobytes() if NATIVE else None)


def test_integers_are_decoded_as_floats() -> None:
    assert converted(b"[1, -2, 0.5]", "FP32") == np.array([1, -2, 0.5], "<f4").tobytes()


def test_empty_arrays_are_decoded() -> None:
    assert {converted(b"[[], []]", datatype) for datatype in (*INTEGERS, *FLOATS)} == {b""}


def test_overflow_to_infinity_raises_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert converted(b"[1e39]", "FP32") is None
    assert converted(b"[65520]", "FP16") is None
    assert not recwarn.list


def test_parser_works_while_an_earlier_error_is_referenced() -> None:
    with pytest.raises(PARSE_ERRORS) as caught:
        parse_numbers(b'["1"]', "d")
    assert caught.value.__traceback__ is not None
    assert converted(b"[1, 2]", "UINT8") == b"\1\2"


@pytest.mark.parametrize("count", [100_000, 200_000])
def test_arrays_of_any_size_are_decoded(count: int) -> None:
    assert converted(b"[%b1]" % (b"1," * (count - 1)), "UINT8") == b"\1" * count
