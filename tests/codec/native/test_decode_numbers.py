"""The C reader of floats agrees with Python, or leaves the text to it."""

import json
import math
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.build_info import NATIVE
from gateway.codec.elements import fast_decode
from gateway.codec.elements.run_job import run_job
from gateway.codec.offload_interface import ConversionJob
from gateway.protocol.datatypes import DATATYPES
from tests.codec.exact_rounding import nearest
from tests.codec.near_ties import near_ties
from tests.support.scale import scaled

if not NATIVE:
    pytest.skip("the C module is not compiled", allow_module_level=True)
native = import_module("gateway.codec.native")

CODES = {4: native.DATATYPE_CODES["FP32"], 8: native.DATATYPE_CODES["FP64"]} if NATIVE else {}

FP32, FP64 = DATATYPES["FP32"], DATATYPES["FP64"]
MIDDLE = 1 + 2**-24
"""Halfway between two FP32 numbers; the even one is 1."""


def without_c(text: bytes, size: int) -> bytes | None:
    """Convert text as a gateway does that is not compiled."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fast_decode, "decode_numbers", None)
        result = run_job(ConversionJob(to_json=False, datatype=FP32 if size == 4 else FP64), text)
    return None if result is None else bytes(result)


READ = [
    (b"[]", []),
    (b"[[],[ ]]", []),
    (b"[0]", [0.0]),
    (b"[-0.0,-0]", [-0.0, 0.0]),
    (b"[-0e5]", [-0.0]),
    (b"[1,2.5,-3e2,4E-1,5e+0]", [1, 2.5, -300, 0.4, 5]),
    (b" [ [ 1 ,\t2 ]\r,\n[ [ 3 ] ] ] ", [1, 2, 3]),
    (b"[0.1,0.10000000149011612]", [0.1, 0.10000000149011612]),
    (b"[1234567890123456789,0.1234567890123456789]", [1234567890123456789, 0.1234567890123456789]),
    (b"[0.0000000000000000000000000123]", [1.23e-26]),
    (b"[-9223372036854775809]", [-9223372036854775809.0]),
    (b"[16777217,16777219]", [2**24 + 1, 2**24 + 3]),
    (b"[%r]" % math.nextafter(MIDDLE, 2), [math.nextafter(MIDDLE, 2)]),
    (b"[" * 64 + b"7" + b"]" * 64, [7]),
    (b"[NaN,Infinity , -Infinity,[NaN]]", [math.nan, math.inf, -math.inf, math.nan]),
]


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize(("text", "values"), READ)
def test_c_reader_reads_floats(text: bytes, values: list[float], size: int) -> None:
    expected = np.array(values, np.float64).astype(f"<f{size}").tobytes()
    assert native.decode_numbers(text, CODES[size]) == expected
    assert native.decode_numbers(memoryview(b"1" + text + b"1")[1:-1], CODES[size]) == expected
    assert without_c(text, size) == expected


LEFT = [
    *(b"", b" ", b"1", b"]", b"[", b"[1", b"[1,", b"[1,]", b"[,1]", b"[1]]", b"[[1]", b"[1][2]"),
    *(b"[1] 2", b"[1 2]", b"[[1][2]]", b"[1,,2]", b"[1]\0", b"{}", b"[{}]"),
    *(b"[01]", b"[-]", b"[+1]", b"[.5]", b"[1.]", b"[1.e5]", b"[1e]", b"[1e+]", b"[0x1]", b"[1_0]"),
    *(b"[-NaN]", b"[+Infinity]", b"[NaN1]", b"[1NaN]", b"[NaNNaN]", b"[Na", b"[NaN", b"[nan]"),
    *(b"[Infinit]", b"[Infinity", b"[--Infinity]", b"[Inf]", b"[null]", b"[true]", b'["1"]'),
    *(b"[1e400]", b"[1e-400]", b"[1e99999999999999999999]", b"[12345678901234567890]"),
    b"[" * 65 + b"7" + b"]" * 65,
]


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("text", LEFT)
def test_c_reader_leaves_unusual_text_to_python(text: bytes, size: int) -> None:
    assert native.decode_numbers(text, CODES[size]) is None


def test_c_reader_leaves_numbers_that_do_not_fit_to_python() -> None:
    largest = np.float32(3.4028235e38).tobytes()
    # Halfway to infinity is 3.40282356779733661637...e38.
    assert native.decode_numbers(b"[3.402823567797336617e38]", CODES[4]) is None
    assert native.decode_numbers(b"[3.402823567797336616e38]", CODES[4]) == largest
    assert native.decode_numbers(b"[3.402823567797336617e38]", CODES[8]) is not None


@pytest.mark.parametrize("code", [-1, 13, 2**31 - 1])
def test_c_reader_refuses_unknown_datatypes(code: int) -> None:
    with pytest.raises(ValueError, match=f"there is no datatype {code}"):
        native.decode_numbers(b"[1]", code)


@pytest.mark.parametrize(
    ("text", "before", "after", "values"),
    [
        (b"1,2", 1, 1, [1, 2]),
        (b"[[1],[2", 0, 2, [1, 2]),
        (b" 1 ],[ 2 ", 2, 2, [1, 2]),
        (b"1]]", 2, 0, [1]),
        (b"1]] ", 2, 0, [1]),
        (b"[[]", 0, 1, []),
        *((text, 1, 1, None) for text in (b"", b",1", b"1,", b"]", b"[", b"1]", b"1],[2", b" ")),
        (b"1]", 1, 1, None),
        (b"1", 0, 0, None),
        (b"1]", 0, 0, None),
        (b"1", 65, 65, None),
        (b"1", -1, -1, None),
    ],
)
def test_c_reader_reads_parts_of_arrays(
    text: bytes, before: int, after: int, values: list[float] | None
) -> None:
    expected = None if values is None else np.array(values, "<f4").tobytes()
    assert native.decode_numbers(text, CODES[4], before, after) == expected


DIGITS = st.text("0123456789", min_size=1, max_size=24)
NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda x: str(np.float32(x))),
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from(["NaN", "Infinity", "-Infinity"]),
    st.tuples(DIGITS, DIGITS, st.integers(-330, 310)).map(lambda of: f"-{of[0]}.{of[1]}e{of[2]}"),
    st.text("0123456789.eE+-", min_size=1, max_size=12),
)
ARRAYS = st.recursive(
    st.lists(NUMBERS, max_size=6), lambda inner: st.lists(st.one_of(NUMBERS, inner), max_size=6)
)


def written(array: object, comma: str) -> str:
    if not isinstance(array, list):
        return str(array)
    return f"[{comma.join(written(element, comma) for element in array)}]"


@given(ARRAYS, st.sampled_from([",", ", ", "\n,\t"]), st.data())
def test_c_reader_agrees_with_python(array: list[object], comma: str, data: st.DataObject) -> None:
    text = written(array, comma).encode()
    if data.draw(st.booleans(), label="cut"):
        at = data.draw(st.integers(0, len(text)), label="at")
        text = text[:at] + data.draw(st.binary(max_size=2), label="with") + text[at + 1 :]
    for size in (4, 8):
        read = native.decode_numbers(text, CODES[size])
        assert read is None or read == without_c(text, size)


@settings(max_examples=scaled(1000))
@given(near_ties())
def test_c_reader_rounds_numbers_near_a_tie_once(case: tuple[str, str]) -> None:
    _, text = case
    for size, datatype in ((4, "FP32"), (8, "FP64")):
        read = native.decode_numbers(f"[{text}]".encode(), CODES[size])
        assert read is None or read == nearest(text, datatype)


def test_c_reader_does_not_round_by_way_of_double() -> None:
    assert (
        native.decode_numbers(b"[2785021513700485228e-19]", CODES[4])
        == np.float32(0.27850214).tobytes()
    )
    # Halfway to the least subnormal float is 7.00649232162408535...e-46.
    assert native.decode_numbers(b"[7.006492321624085e-46]", CODES[4]) == bytes(4)
    assert native.decode_numbers(b"[-7.006492321624086e-46]", CODES[4]) == b"\1\0\0\x80"


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1))
def test_c_reader_reads_what_clients_send(values: list[float]) -> None:
    text = json.dumps([float(np.float32(value)) for value in values]).encode()
    assert native.decode_numbers(text, CODES[4]) == np.array(values, "<f4").tobytes()
