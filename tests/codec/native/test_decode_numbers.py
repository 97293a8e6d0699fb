"""The C reader of numbers agrees with Python, or leaves the text to it."""

import ctypes
import json
import math
import os
import re
import runpy
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.build_info import NATIVE
from gateway.codec import native
from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.json.array_scanner import ElementRun
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES, Family
from gateway.protocol.error_vocabulary import REQUEST, RESPONSE
from tests.codec.exact_rounding import (
    FORMATS,
    beside_middles,
    middle_above,
    nearest,
    packed,
    with_point,
)
from tests.codec.reference import DTYPES
from tests.codec.without_c import without_c
from tests.support.scale import scaled

if not NATIVE:
    pytest.skip("the C module is not compiled", allow_module_level=True)

FLOATS = [name for name, each in DATATYPES.items() if each.family is Family.FLOAT]
INTEGERS = [name for name, each in DATATYPES.items() if each.family is Family.INTEGER]
NUMBERS = [*INTEGERS, *FLOATS]
ALL = [*NUMBERS, "BOOL"]

DOWNWARD = {"x86_64": 0x400, "aarch64": 0x800000}
"""FE_DOWNWARD of fenv.h, by machine."""

MIDDLE = 1 + 2**-24
"""Halfway between two FP32 numbers; the even one is 1."""


def read(
    text: bytes, datatype: str, before: int = 0, after: int = 0, null_is_nan: bool = False
) -> bytes | None:
    return native.decode_numbers(text, native.DATATYPE_CODES[datatype], before, after, null_is_nan)


def in_python(
    text: bytes, datatype: str, before: int = 0, after: int = 0, null_is_nan: bool = False
) -> bytes | None:
    """Convert text as a gateway does that is not compiled."""
    decoder = TensorDecoder("x", DATATYPES[datatype], RESPONSE if null_is_nan else REQUEST)
    with without_c():
        try:
            decoder.feed(ElementRun(text, before, after, first=not before))
        except GatewayError:
            return None
    return b"".join(decoder.chunks)


def read_one(element: str, datatype: str) -> bytes | None:
    """Read an element alone and among others, where many characters are read at a time."""
    size = DATATYPES[datatype].size
    assert size is not None
    others = ",".join(["false" if datatype == "BOOL" else "0"] * 20)
    alone = read(f"[{element}]".encode(), datatype)
    among = read(f"[{others},{element},{others}]".encode(), datatype)
    assert alone == (None if among is None else among[20 * size : -20 * size])
    return alone


def binary(values: Any, datatype: str) -> bytes:
    """Convert values with numpy."""
    return np.array(values).astype(DTYPES[datatype]).tobytes()


NULLS = [
    (b"[null]", [math.nan]),
    (b"[1,null,-Infinity,[ null ],NaN]", [1, math.nan, -math.inf, math.nan, math.nan]),
    (b"[" + b"null, " * 40 + b"null\n]", [math.nan] * 41),
    (b"[[0.5,null],[null,0.5]]", [0.5, math.nan, math.nan, 0.5]),
]
READ = [
    (b"[]", []),
    (b"[[],[ ]]", []),
    (b"[0]", [0.0]),
    (b"[-0.0,-0]", [-0.0, 0.0]),
    (b"[-0e5]", [-0.0]),
    (b"[1,2.5,-3e2,4E-1,5e+0]", [1, 2.5, -300, 0.4, 5]),
    (b" [ [ 1 ,\t2 ]\r,\n[ [ 3 ] ] ] ", [1, 2, 3]),
    (b"[0.1,0.10000000149011612]", [0.1, 0.10000000149011612]),
    (b"[0.1234567890123456789,12.0000000000000000000000000]", [0.1234567890123456789, 12]),
    (b"[0.0000000000000000000000000123]", [1.23e-26]),
    (b"[1e-400,-1e-400,1e-342,-5e-324]", [0.0, -0.0, 0.0, -5e-324]),
    (b"[%r]" % math.nextafter(MIDDLE, 2), [math.nextafter(MIDDLE, 2)]),
    (b"[" * 64 + b"7" + b"]" * 64, [7]),
    (b"[NaN,Infinity , -Infinity,[NaN]]", [math.nan, math.inf, -math.inf, math.nan]),
]


@pytest.mark.parametrize(("text", "values"), [*READ, *NULLS])
def test_c_reader_reads_floats_and_null_as_nan_if_wanted(text: bytes, values: list[float]) -> None:
    has_null = b"null" in text
    view = memoryview(b"1" + text + b"1")[1:-1]
    for datatype in FLOATS:
        expected = binary(np.array(values, np.float64), datatype)
        code = native.DATATYPE_CODES[datatype]
        assert native.decode_numbers(view, code, 0, 0, True) == expected
        assert in_python(text, datatype, null_is_nan=True) == expected
        for convert in (read, in_python):
            assert convert(text, datatype) == (None if has_null else expected)
    for datatype in (*INTEGERS, "BOOL") if has_null else ():
        assert read(text, datatype, null_is_nan=True) is None


@pytest.mark.parametrize("datatype", INTEGERS)
def test_c_reader_reads_integers_up_to_their_limits(datatype: str) -> None:
    integers = DATATYPES[datatype].integers
    assert integers is not None
    least, most = integers.least, integers.most
    for value in (least, least + 1, 0, 1, 9, 10, 99, 100, 127, most - 1, most):
        assert read_one(str(value), datatype) == binary([value], datatype)
    assert read_one("-0", datatype) == binary([0], datatype)
    beyond = [least - 1, most + 1, 10 * most, 100 * most, -(2**63) - 1, 2**64, 2**64 + 1, 10**20]
    for value in (*beyond, 10**30, 10**60, 2 * 10**19 - 1):
        assert read_one(str(value), datatype) is None


BROKEN = [
    *(b"", b" ", b"1", b"]", b"[", b"[1", b"[1,", b"[1,]", b"[,1]", b"[1]]", b"[[1]", b"[1][2]"),
    *(b"[1] 2", b"[1 2]", b"[[1][2]]", b"[1,,2]", b"[1]\0", b"{}", b"[{}]", b"[1, ]", b"[1,[2],]"),
    *(b"[01]", b"[-]", b"[+1]", b"[.5]", b"[1.]", b"[1.e5]", b"[1e]", b"[1e+]", b"[0x1]", b"[1_0]"),
    *(b"[-NaN]", b"[+Infinity]", b"[NaN1]", b"[1NaN]", b"[NaNNaN]", b"[Na", b"[NaN", b"[nan]"),
    *(b"[Infinit]", b"[Infinity", b"[--Infinity]", b"[Inf]", b'["1"]', b"[-01]", b"[/]"),
    *(b"[tru]", b"[true1]", b"[truefalse]", b"[True]", b"[true,1]", b"[falsee]", b"[fals", b"[:]"),
    *(b"[nul]", b"[nulls]", b"[nullnull]", b"[-null]", b"[null1]", b"[1null]", b"[nul", b"[n]"),
    *(b"[null", b"[null]]", b"[Null]", b"[null,]", b"[,null]", b"[null null]"),
    *(b"[1e99999999999999999999]", b"[-0.1E+10000000000000000]", b"[1\xb0]", b"[\xb1]"),
]


@pytest.mark.parametrize(
    "text", [*BROKEN, b"[1e400]", b"[" * 65 + b"7" + b"]" * 65, b"[" * 65 + b"true" + b"]" * 65]
)
def test_c_reader_leaves_unusual_text_to_python(text: bytes) -> None:
    spaced = b"[" + b" [0.5]," * 20 + text[1:]
    for datatype in ALL:
        for wanted in (False, True):
            assert read(text, datatype, null_is_nan=wanted) is None
            assert read(spaced, datatype, null_is_nan=wanted) is None


def test_pool_reads_null_as_nan_if_wanted() -> None:
    reader, writer = os.pipe()
    assert native.ThreadPool is not None
    pool = native.ThreadPool(1, writer)
    code = native.DATATYPE_CODES["FP16"]
    conversions = [pool.decode_numbers(b"1,null", code, 1, 1, wanted) for wanted in (True, False)]
    conversions.append(pool.decode_numbers(b"1,null", code, 1, 1))
    for conversion in conversions:
        if conversion.notify():
            os.read(reader, 1)
        assert conversion.done
    results = [conversion.take_result() for conversion in conversions]
    assert results == [binary([1, math.nan], "FP16"), None, None]
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("code", [-1, 13, 2**31 - 1])
def test_c_reader_refuses_unknown_datatypes(code: int) -> None:
    with pytest.raises(ValueError, match=f"there is no datatype {code}"):
        native.decode_numbers(b"[1]", code)


PARTS = [
    (b"1,0", 1, 1, [1, 0]),
    (b"[[1],[0", 0, 2, [1, 0]),
    (b" 1 ],[ 0 ", 2, 2, [1, 0]),
    (b"1]]", 2, 0, [1]),
    (b"1]] ", 2, 0, [1]),
    (b"[[]", 0, 1, []),
    (b"0,1,0,1,1,0,1,1,0,1, 0, 0, 1],[1,0,[1,1,1]", 2, 1, None),
    (b"0,1,0,1,1,0,1,1,0,1, 0, 0, 1],[1,0],[1,1,1", 2, 2, [int(c) for c in "010110110100110111"]),
    *((text, 1, 1, None) for text in (b"", b",1", b"1,", b"]", b"[", b"1]", b"1],[0", b" ", b"[1")),
    (b"1]", 1, 1, None),
    (b"1", 0, 0, None),
    (b"1]", 0, 0, None),
    (b"1", 65, 65, None),
    (b"1", -1, -1, None),
]


@pytest.mark.parametrize(("text", "before", "after", "values"), PARTS)
def test_c_reader_reads_parts_of_arrays(
    text: bytes, before: int, after: int, values: list[int] | None
) -> None:
    words = text.replace(b"1", b"true").replace(b"0", b"false")
    for datatype in ALL:
        expected = None if values is None else binary(values, datatype)
        part = words if datatype == "BOOL" else text
        assert read(part, datatype, before, after) == expected


DIGITS = st.text("0123456789", min_size=1, max_size=24)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ELEMENTS = st.one_of(
    FINITE.map(repr),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda x: str(np.float32(x))),
    st.floats(allow_nan=False, allow_infinity=False, width=16).map(repr),
    st.integers(-(2**70), 2**70).map(str),
    st.integers(-200, 300).map(str),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "true", "false", "null"]),
    st.tuples(DIGITS, DIGITS, st.integers(-330, 310)).map(lambda of: f"-{of[0]}.{of[1]}e{of[2]}"),
    st.text("0123456789.eE+-", min_size=1, max_size=12),
)
BOOLEANS = st.sampled_from(["true", "false"])


def arrays(elements: st.SearchStrategy[str]) -> st.SearchStrategy[list[Any]]:
    return st.recursive(
        st.lists(elements, max_size=12),
        lambda inner: st.lists(st.one_of(elements, inner), max_size=6),
    )


def written(array: object, comma: str) -> str:
    if not isinstance(array, list):
        return str(array)
    return f"[{comma.join(written(element, comma) for element in array)}]"


@given(
    arrays(ELEMENTS) | arrays(st.integers(0, 99).map(str)) | arrays(BOOLEANS),
    st.sampled_from([",", ", ", "\n,\t"]),
    st.data(),
)
def test_c_reader_agrees_with_python(array: list[object], comma: str, data: st.DataObject) -> None:
    text = written(array, comma).encode()
    before = data.draw(st.sampled_from([0, 0, 1, 2]), label="before")
    after = data.draw(st.sampled_from([0, 0, 1, 2]), label="after")
    text = text[min(before, len(text)) : max(before, len(text) - after)]
    if data.draw(st.booleans(), label="cut"):
        at = data.draw(st.integers(0, len(text)), label="at")
        text = text[:at] + data.draw(st.binary(max_size=2), label="with") + text[at + 1 :]
    for datatype in ALL:
        for null_is_nan in (False, True):
            found = read(text, datatype, before, after, null_is_nan)
            assert found in (None, in_python(text, datatype, before, after, null_is_nan))


@given(st.sampled_from(NUMBERS), st.data())
def test_c_reader_leaves_no_usual_number_to_python(datatype: str, data: st.DataObject) -> None:
    integers = DATATYPES[datatype].integers
    if integers is not None:
        each = st.integers(integers.least, integers.most).map(str)
    else:
        largest = 65504.0 if datatype == "FP16" else 1e38
        each = st.one_of(
            st.floats(-largest, largest).map(repr), st.floats(-999, 999).map("{:.15f}".format)
        )
    elements = data.draw(st.lists(each, min_size=1, max_size=40))
    text = f"[{data.draw(st.sampled_from([',', ', ']), label='comma').join(elements)}]".encode()
    assert read(text, datatype) == in_python(text, datatype) != b""


MANY = 45
"""Elements that take more than a block of text, which the C reader checks as a whole."""

ODD_INTEGERS = [
    *("", "-", "--1", "1-", "-1-1", "01", "-01", "00", "-00", "1 2", "1 ", " 1", "  1", "1."),
    *("1e2", "1:", "1/", "-[", "[", "]", "[]", "[1]", "[-1]", "[ 1 ]", "[[1],2]", "1]", "[1"),
    *("]1", "1[1]", "1],[1", "],[1", "1],[", "1 ],[ 1", "1], [1", "[1],[1]", "1]]],[[[1"),
    *("1,\n1", "true"),
    *(sign + "9" * digits for sign in ("", "-") for digits in range(1, 23)),
    *(str(2**bits + more) for bits in (7, 8, 15, 16, 31, 32, 63, 64) for more in (-1, 0)),
    *(str(-(2**bits) - more) for bits in (7, 15, 31, 63) for more in (0, 1)),
    *("1" + "0" * zeros for zeros in range(1, 22)),
    *("-0", "-9230000000000000000", "18450000000000000000", "184467440737095516150"),
]
ODD_BOOLEANS = [
    *("", "tru", "fals", "alse", "rue", "ftrue", "tfalse", "truee", "falsee", "falsefalse", "e"),
    *("tralse", "trte", "faaae", "TRUE", "true ", " false", "1", "null", "[true]", "true]"),
    *("[false", "]true", "[]", "true],[false", "true,\tfalse", "tr\0e"),
]
ODD_FLOATS = [
    *(odd for odd in ODD_INTEGERS if odd != "true"),
    *("1.", ".5", "-.5", "-", "1.5.", "1.5.5", "1..5", "1.-5", "1 .5", "1. 5", "00.5", "-00.5"),
    *("0.0", "-0.0", "-0.5", "0.5-", "5.0]", "[0.5", "0.5],[0.5", "1.5e3", "-1e-05", "1.5e", "1/5"),
    *("NaN", "-Infinity", "null", "1e39", "16777217", "9007199254740993.0", "1.0000000596046448"),
    *(f"0.{zeros}{'7' * count}" for zeros in ("", "00", "0" * 14) for count in range(1, 22)),
    *(f"-0.{'7' * count}" for count in range(1, 22)),
    *(f"{'7' * count}.{'3' * more}" for count in range(2, 20) for more in (1, 3, 18)),
]


def around(odd: str, comma: str, before: int, usual: str) -> bytes:
    """Write an array in an array with an element among many usual ones."""
    elements = [*[usual] * before, odd, *[usual] * MANY]
    return f"[[{comma.join(elements)}]]".encode()


@pytest.mark.parametrize("comma", [",", ", "])
@pytest.mark.parametrize("datatype", ALL)
def test_c_reader_agrees_with_python_on_an_odd_element_anywhere(datatype: str, comma: str) -> None:
    usual, odd_elements = "10", ODD_INTEGERS
    if datatype == "BOOL":
        usual, odd_elements = "false", ODD_BOOLEANS
    elif datatype in FLOATS:
        usual, odd_elements = "-1.5", ODD_FLOATS
    size = DATATYPES[datatype].size or 0
    for odd in odd_elements:
        text = around(odd, comma, MANY, usual)
        found = read(text, datatype)
        assert found in (None, in_python(text, datatype))
        for before in range(1, MANY):
            behind = None if found is None else found[(MANY - before) * size :]
            assert read(around(odd, comma, before, usual), datatype) == behind


@pytest.mark.parametrize("datatype", [*INTEGERS, "BOOL"])
@given(data=st.data())
def test_c_reader_reads_long_arrays_of_one_element_and_another(
    datatype: str, data: st.DataObject
) -> None:
    """In a block, the longest number decides how all are converted."""
    limits = DATATYPES[datatype].integers
    each: st.SearchStrategy[int] = st.booleans()
    if limits is not None:
        digits = data.draw(st.integers(1, 20), label="digits")
        least, most = max(limits.least, -(10**digits)), min(limits.most, 10**digits)
        each = st.integers(least, most) | st.sampled_from([limits.least, limits.most])
    row = data.draw(st.integers(1, 12), label="row")
    rows = data.draw(st.lists(st.lists(each, min_size=row, max_size=row), min_size=8, max_size=20))
    comma = data.draw(st.sampled_from([",", ", "]), label="comma")
    text = json.dumps(rows, separators=(comma, "")).encode()
    values = [value for row in rows for value in row]
    expected = np.array(values, DTYPES[datatype]).tobytes()
    flat = b"[" + text.replace(b"[", b"").replace(b"]", b"") + b"]"
    assert read(text, datatype) == read(flat, datatype) == expected


def near_middles(datatype: str) -> st.SearchStrategy[str]:
    """Generate numbers with few digits that are at the middle of two floats, or beside it."""
    precision, least, _ = FORMATS[datatype]
    ones = st.integers((-12 - least) << precision - 1, (62 - least) << precision - 1)
    near = st.builds(
        lambda bits, places: f"{middle_above(bits, datatype):.{places}f}", ones, st.integers(0, 19)
    )
    return near.filter(lambda text: len(text) < 22)


@pytest.mark.parametrize("datatype", FLOATS)
@given(data=st.data())
def test_c_reader_rounds_long_arrays_of_one_float_and_another(
    datatype: str, data: st.DataObject
) -> None:
    places = data.draw(st.integers(0, 20), label="places")
    each = st.floats(-999, 999).map(f"{{:.{places}f}}".format) | near_middles(datatype)
    row = data.draw(st.integers(1, 12), label="row")
    rows = data.draw(st.lists(st.lists(each, min_size=row, max_size=row), min_size=8, max_size=20))
    comma = data.draw(st.sampled_from([",", ", "]), label="comma")
    text = written(rows, comma).encode()
    expected = [nearest(value, datatype) for row in rows for value in row]
    joined = None if None in expected else b"".join(each for each in expected if each is not None)
    flat = b"[" + text.replace(b"[", b"").replace(b"]", b"") + b"]"
    assert read(text, datatype) == read(flat, datatype) == joined


@pytest.mark.skipif(os.uname().machine not in DOWNWARD, reason="its code of this is not known")
@pytest.mark.parametrize("datatype", FLOATS)
def test_c_reader_rounds_to_nearest_where_a_library_has_set_another_way(datatype: str) -> None:
    text, way = b"[%s]" % b",".join(b"%d.7" % number for number in range(MANY)), ctypes.CDLL(None)
    expected = read(text, datatype)
    way.fesetround(DOWNWARD[os.uname().machine])
    try:
        found = read(text, datatype)
    finally:
        way.fesetround(0)
    assert found == expected


@settings(max_examples=scaled(1000))
@given(beside_middles())
@example(("FP32", "2785021513700485228e-19"))
@example(("FP32", "7.006492321624085e-46"))  # the least subnormal one is 7.0064923216240853...e-46
@example(("FP32", "-7.006492321624086e-46"))
@example(("FP16", "2.98023223876953125e-08"))  # half of the least subnormal one
@example(("FP16", "8.94069671630859375e-08"))
@example(("FP16", "2.980232238769531251e-08"))
@example(("BF16", "1.00390625"))
@example(("BF16", "1.01171875"))
def test_c_reader_rounds_numbers_of_any_length_once(case: tuple[str, str]) -> None:
    datatype, text = case
    expected = nearest(text, datatype)
    assert read_one(text, datatype) == expected
    assert in_python(f"[{text}]".encode(), datatype) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-1000", 0.0),
        ("-1e-10000", -0.0),
        ("123456789012345678901234567890E-99999999999999999999999999999", 0.0),
        ("1e-9223372036854775809", 0.0),
        ("0e99999999999999999999", 0.0),
        ("-0.00E+18446744073709551617", -0.0),
        (f"1e{'0' * 5000}2", 100.0),
        (f"0.{'0' * 200_000}15e200001", 1.5),
        (f"-15{'0' * 200_000}e-200001", -1.5),
    ],
)
def test_c_reader_reads_exponents_of_many_digits(text: str, value: float) -> None:
    for datatype in FLOATS:
        assert read_one(text, datatype) == binary([value], datatype)
        assert in_python(f"[{text}]".encode(), datatype) == binary([value], datatype)


@pytest.mark.parametrize("exponent", ["", "E+1", "e-40"])
@pytest.mark.parametrize("datatype", FLOATS)
def test_last_digit_of_a_very_long_number_decides(datatype: str, exponent: str) -> None:
    """No window of text has more digits."""
    shift = int(exponent[1:] or 0)
    for bits in (0x3C00, 0x3C01):  # subnormal in FP32 and FP64
        _, integers, power = middle_above(bits, datatype).as_tuple()
        assert isinstance(power, int)
        digits = "".join(map(str, integers))
        zeros = "0" * 300_000
        numbers = {digits + zeros: bits + (bits & 1), digits + zeros + "1": bits + 1}
        numbers[str(int(digits) - 1) + zeros.replace("0", "9")] = bits
        for number, expected in numbers.items():
            point = len(integers) + power - shift
            text = with_point(number, 0, point).partition("e")[0] + exponent
            assert read(f"[{text}]".encode(), datatype) == packed(expected, datatype)


@pytest.mark.parametrize("datatype", FLOATS)
def test_middle_of_the_largest_float_and_infinity_is_too_large(datatype: str) -> None:
    precision, least, most = FORMATS[datatype]
    largest = (most - least + 2 << precision - 1) - 1
    limit = int(middle_above(largest, datatype))
    for zeros in (1, 30, 900):
        below = f"{limit - 1}.{'9' * zeros}"
        assert read_one(below, datatype) == packed(largest, datatype)
        assert read_one(f"{limit}.{'0' * zeros}", datatype) is None
        assert read_one(f"{limit}.{'0' * zeros}1", datatype) is None


def test_powers_of_ten_have_enough_bits_for_any_64_bits_of_digits() -> None:
    """Digits times 128 bits of an inexact power never come near a carry into those of a float.

    If any did, the product would end in 9 bits of ones, which are beyond those of FP64 and the one
    for rounding, and in 64 more, before what is cut off of it.
    """
    root = Path(__file__).parents[3]
    script = runpy.run_path(str(root / "build_tools" / "float_tables.py"))
    header = script["powers_of_ten"]().split("UNITS")[0]
    rows = re.findall(r"\{(0x[0-9a-f]+), (0x[0-9a-f]+)\}", header)
    powers = [int(high, 16) << 64 | int(low, 16) for high, low in rows]
    assert len(powers) == 342 + 1 + 308
    modulus = 2 ** (128 + 9)
    for power in powers:
        digits = first_multiple(power, modulus, modulus - 2**64, modulus - 1)
        assert digits is None or digits >= 2**64


def first_multiple(step: int, modulus: int, least: int, most: int) -> int | None:
    """Return the least number whose product with ``step`` has a rest from ``least`` to ``most``."""
    if least == 0:
        return 0
    if step == 0:
        return None
    count = -(-least // step)
    if count * step <= most:
        return count
    # No multiple before the first modulus: which multiple of it is so far below one of the step?
    rounds = first_multiple(modulus % step, step, -most % step, -least % step)
    return None if rounds is None else -(-(least + modulus * rounds) // step)


def finite_floats(datatype: str) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float64]]:
    """Return the bits and the values of all finite floats of two bytes."""
    infinity = int.from_bytes(binary([math.inf], datatype), "little")
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[bits & infinity != infinity]
    return bits, bits.view(DTYPES[datatype]).astype(np.float64)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
@pytest.mark.parametrize("written", ["%.4e", "%.16e", "%.24e", "%.17f", "%.29f"])
def test_every_float_of_two_bytes_is_read_as_it_was_written(datatype: str, written: str) -> None:
    bits, values = finite_floats(datatype)
    if written.endswith("f"):
        is_shown = (np.abs(values) > 1e-9) | (values == 0)
        bits, values = bits[is_shown], values[is_shown]
    text = ",".join(map(written.__mod__, values.tolist()))
    assert read(f"[{text}]".encode(), datatype) == bits.tobytes()


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_every_middle_of_two_floats_is_rounded_to_the_even_one(datatype: str) -> None:
    bits, values = finite_floats(datatype)
    count = len(bits) // 2 - 1  # of those above 0 and below the largest one
    middles = ((values[:count] + values[1 : count + 1]) / 2).tolist()
    evens = (bits[:count] + (bits[:count] & 1)).tolist()
    pairs = zip(map("{:.18e}".format, middles), middles, evens, strict=True)
    exact = [(text, even) for text, middle, even in pairs if Decimal(text) == Decimal(middle)]
    texts, expected = zip(*exact, strict=True)
    assert len(texts) > 2000
    assert read(f"[{','.join(texts)}]".encode(), datatype) == np.array(expected, "<u2").tobytes()


@pytest.mark.parametrize("datatype", ["UINT8", "INT8", "UINT16", "INT16"])
def test_every_integer_of_a_byte_or_two_is_read(datatype: str) -> None:
    integers = DATATYPES[datatype].integers
    assert integers is not None
    values = range(integers.least, integers.most + 1)
    text = f"[{', '.join(map(str, values))}]".encode()
    assert read(text, datatype) == binary(values, datatype)
