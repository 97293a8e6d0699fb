"""The C encoder of numbers writes what orjson writes.

By hand, for all 2**32 FP32 values: ``python -m tests.codec.native.test_encode_numbers``. It takes
minutes; arguments are the first bit pattern and the end of the range.
"""

import math
import struct
import sys
from contextlib import suppress
from itertools import product
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.build_info import NATIVE
from gateway.codec import native
from gateway.codec.elements.encode import NumberEncoder
from gateway.codec.policies import Nonfinite
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES
from tests.codec.reference import DTYPES
from tests.codec.without_c import without_c
from tests.support.scale import scaled

if not NATIVE:
    pytest.skip("the C module is not compiled", allow_module_level=True)

CODES = native.DATATYPE_CODES
ERROR, NULL, LITERAL, STRING = range(4)
POLICIES = {
    ERROR: Nonfinite.ERROR,
    NULL: Nonfinite.NULL,
    LITERAL: Nonfinite.LITERAL,
    STRING: Nonfinite.STRING,
}


def in_python(
    data: bytes, name: str, policy: int = NULL, shape: tuple[int, ...] = ()
) -> bytes | None:
    """Encode elements as a gateway does that is not compiled."""
    datatype, nonfinite = DATATYPES[name], POLICIES[policy]
    with without_c():
        try:
            return bytes(NumberEncoder("", datatype, nonfinite).encode(data, 0, shape))
        except GatewayError:
            return None


def agrees(values: npt.NDArray[Any], name: str, policy: int = NULL) -> None:
    data = values.tobytes()
    found, expected = (
        native.encode_numbers(data, CODES[name], policy),
        in_python(data, name, policy),
    )
    assert found is not None
    assert expected is not None
    if found != expected:  # pytest would take minutes to show where
        pairs = zip(found.split(b","), expected.split(b","), strict=True)
        assert [pair for pair in pairs if pair[0] != pair[1]] == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("FP32", 1e-6, "0.000001"),
        ("FP32", 1e13, "1e+13"),
        ("FP32", 1e-45, "1e-45"),
        ("FP32", 3.4028235e38, "3.4028235e+38"),
        ("FP32", 40000.0625, "40000.062"),  # a tie: the even digit
        ("FP32", 123456789.0, "123456790.0"),
        ("FP64", 1e-6, "1e-6"),
        ("FP64", 1e13, "10000000000000.0"),
        ("FP64", 5e-324, "5e-324"),
        ("FP64", 2.2250738585072014e-308, "2.2250738585072014e-308"),
        ("FP64", 1.7976931348623157e308, "1.7976931348623157e+308"),
        ("FP64", 9007199254740993.0, "9007199254740992.0"),
        ("FP64", 9.5, "9.5"),
        ("FP64", 1000000000000000.25, "1000000000000000.2"),  # a tie: the even digit
        ("FP16", 65504.0, "65504.0"),
        ("FP16", 6e-8, "5.9604645e-8"),
        ("BF16", 1e38, "9.96921e+37"),
    ],
)
def test_floats_are_written_by_their_datatype(name: str, value: float, text: str) -> None:
    data = np.array([value]).astype(DTYPES[name]).tobytes()
    assert native.encode_numbers(data, CODES[name]) == text.encode()


@pytest.mark.parametrize("name", [name for name, of in DATATYPES.items() if of.integers])
def test_integers_of_all_lengths_are_written(name: str) -> None:
    limits = DATATYPES[name].integers
    assert limits is not None
    powers = [sign * 10**power for power in range(20) for sign in (1, -1)]
    near = [power + offset for power in powers for offset in (-1, 0, 1)]
    some = [limits.least, limits.most, *(n for n in near if limits.least <= n <= limits.most)]
    beside_each = [n for pair in product(some, some) for n in pair]
    for values in (some, beside_each, beside_each[1:], *(some[at : at + 9] for at in range(9))):
        data = np.array(values, DTYPES[name]).tobytes()
        assert native.encode_numbers(data, CODES[name]) == ",".join(map(str, values)).encode()


def test_booleans_are_written_as_words() -> None:
    assert native.encode_numbers(b"\0\1\1", CODES["BOOL"]) == b"false,true,true"
    assert native.encode_numbers(b"\0\2\1", CODES["BOOL"]) is None
    assert native.encode_numbers(b"\xff" * 9, CODES["BOOL"]) is None


def test_no_elements_are_no_text() -> None:
    assert {native.encode_numbers(b"", code) for code in CODES.values()} == {b""}


@pytest.mark.parametrize("name", ["FP16", "FP32", "FP64", "BF16"])
def test_values_that_json_lacks_are_written_by_policy(name: str) -> None:
    values = [math.nan, -math.nan, math.inf, -math.inf, 1]
    data, code = np.array(values).astype(DTYPES[name]).tobytes(), CODES[name]
    assert native.encode_numbers(data, code) is None
    assert native.encode_numbers(data, code, ERROR) is None
    assert native.encode_numbers(data, code, NULL) == b"null,null,null,null,1.0"
    assert native.encode_numbers(data, code, LITERAL) == b"NaN,NaN,Infinity,-Infinity,1.0"
    assert native.encode_numbers(data, code, STRING) == b'"NaN","NaN","Infinity","-Infinity",1.0'


def test_rows_are_nested() -> None:
    def nested(count: int, *shape: int) -> bytes | None:
        return native.encode_numbers(bytes(range(count)), CODES["UINT8"], 0, False, shape)

    assert nested(4) == nested(4, 4) == b"0,1,2,3"
    assert nested(4, 2, 2) == b"[0,1],[2,3]"
    assert nested(4, 1, 4) == b"[0,1,2,3]"
    assert nested(4, 1, 2, 2) == b"[[0,1],[2,3]]"
    assert nested(4, 2, 1, 2) == b"[[0,1]],[[2,3]]"
    assert nested(2, 2, 1, 1) == b"[[0]],[[1]]"
    for shape in ((3,), (5,), (2, 3), (0, 4), (4, 0), (2**40, 2**40), (1,) * 65):
        with pytest.raises(ValueError, match="this is not the shape of the elements"):
            nested(4, *shape)
    data = struct.pack("<4f", 1, 2, 3, math.nan)
    assert native.encode_numbers(data, CODES["FP32"], ERROR, False, (2, 2)) is None
    nested_text = native.encode_numbers(data, CODES["FP32"], NULL, False, (2, 2))
    assert nested_text == b"[1.0,2.0],[3.0,null]"
    with pytest.raises(OverflowError):
        nested(4, -2, -2)
    with pytest.raises(TypeError):
        native.encode_numbers(b"\0", CODES["UINT8"], 0, False, ("1",))  # type: ignore[arg-type]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no datatype 13"):
        native.encode_numbers(b"", 13)
    with pytest.raises(ValueError, match="there is no datatype -1"):
        native.encode_numbers(b"", -1)
    for policy in (-1, 4):
        with pytest.raises(ValueError, match=f"there is no way {policy} to write a NaN"):
            native.encode_numbers(b"", 0, policy)
    for name in CODES:
        if DATATYPES[name].size != 1:
            with pytest.raises(ValueError, match="the data end inside an element"):
                native.encode_numbers(b"123", CODES[name])


REFUSED: dict[str, tuple[Any, ...]] = {
    "no argument": (),
    "one argument": (b"",),
    "too many": (b"", 0, 0, 0, (), 0),
    "no buffer": ("", 0, 0),
    "no integer": (b"", 0, None),
    "numpy": (b"", np.int64(0), 0),
    "fraction": (b"", 0, 0.0),
    "huge": (b"", 0, 2**63),
    "huge and negative": (b"", 0, -(2**64)),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", ["decode_numbers", "encode_numbers", "scan_numbers"])
def test_arguments_of_other_kinds_are_refused(name: str, case: str) -> None:
    function: Any = getattr(native, name)
    with pytest.raises((TypeError, OverflowError, BufferError)):
        function(*REFUSED[case])


def test_buffers_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(BufferError):
        native.scan_numbers(memoryview(b"12345678")[::2], 0, 1)


@pytest.mark.parametrize("more", [(99,), (-1,), (0, -1), (3, 0, 0, (5, 5)), (3, 0, 0, ("1",)), ()])
@pytest.mark.parametrize("name", ["decode_numbers", "encode_numbers", "scan_numbers"])
def test_refused_arguments_leave_no_buffer_exported(name: str, more: tuple[Any, ...]) -> None:
    function: Any = getattr(native, name)
    data = bytearray(b"[1]")
    with suppress(TypeError, ValueError):
        function(data, *more)
    data.append(0)  # raises BufferError while it is exported


ELEMENTS = st.one_of(
    st.binary(min_size=8, max_size=8),
    st.floats(width=32).map(lambda x: struct.pack("<f", x) * 2),
    st.floats().map(lambda x: struct.pack("<d", x)),
    st.integers(-(10**6), 10**6).map(lambda n: struct.pack("<d", n / 1000)),
    st.integers(-999, 999).map(lambda n: struct.pack("<ff", n, n / 100)),
    st.integers(0, 255).map(lambda n: struct.pack("<Q", n)),
    st.sampled_from([b"\0\1\1\0\0\0\1\1", b"\0" * 8]),
)


@settings(max_examples=scaled(1000))
@given(st.sampled_from([*CODES]), st.lists(ELEMENTS, max_size=8), st.sampled_from([*POLICIES]))
def test_c_encoder_agrees_with_the_pure_way(name: str, elements: list[bytes], policy: int) -> None:
    data = b"".join(elements)
    expected = in_python(data, name, policy)
    assert native.encode_numbers(data, CODES[name], policy) == expected
    for offset in range(1, 8):
        unaligned = memoryview(bytes(offset) + data)[offset:]
        assert native.encode_numbers(unaligned, CODES[name], policy) == expected


@settings(max_examples=scaled(200))
@given(st.sampled_from([*CODES]), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.randoms())
def test_nested_elements_agree_with_the_pure_way(name: str, shape: list[int], rng: Random) -> None:
    size = DATATYPES[name].size
    assert size is not None
    data = bytes(rng.choices((0, 1), k=math.prod(shape) * size))
    expected = in_python(data, name, NULL, tuple(shape))
    assert native.encode_numbers(data, CODES[name], NULL, False, tuple(shape)) == expected


@pytest.mark.parametrize(("name", "policy"), [("FP16", NULL), ("BF16", LITERAL)])
def test_every_short_float_is_written_as_by_the_pure_way(name: str, policy: int) -> None:
    agrees(np.arange(65536, dtype="<u2"), name, policy)


@pytest.mark.parametrize("name", ["BF16", "FP16", "FP32", "FP64"])
@pytest.mark.parametrize("special", [0.0, -0.0, 1.0, -4e-5, 6e-8, 1e-38, 5e-324, 2.0**70, math.inf])
def test_special_floats_are_written_among_others(name: str, special: float) -> None:
    """The encoder writes four floats at once, but for the special ones of them."""
    for count in range(10):
        for at in range(count):
            values = np.linspace(-3.3, 1.7, count)
            values[at] = special
            with np.errstate(over="ignore", under="ignore"):
                agrees(values.astype(DTYPES[name]), name)
                agrees(np.full(count, special).astype(DTYPES[name]), name)


def test_sample_of_all_fp32_is_written_as_by_the_pure_way() -> None:
    rng = np.random.default_rng()
    agrees(rng.integers(0, 2**32, scaled(500_000), np.uint32), "FP32")


def test_fp32_with_short_mantissas_are_written_as_by_the_pure_way() -> None:
    exponents = np.arange(512, dtype=np.uint32) << 23
    ends = np.array([0, 1, 2, 3, 2**22, 2**23 - 2, 2**23 - 1], np.uint32)
    agrees(exponents[:, None] + ends, "FP32")


def test_fp64_near_powers_of_two_and_ten_are_written_as_by_the_pure_way() -> None:
    offsets = np.arange(-3, 4, dtype=np.int64)
    twos = np.arange(4096, dtype=np.uint64) << np.uint64(52)
    agrees((twos.view(np.int64)[:, None] + offsets), "FP64")
    tens = np.array([float(f"{digit}e{power}") for power in range(-323, 309) for digit in (1, 5)])
    agrees((tens.view(np.int64)[:, None] + offsets), "FP64")


@pytest.mark.parametrize("name", ["FP32", "FP64"])
def test_ties_are_written_as_by_the_pure_way(name: str) -> None:
    """Integers and binary fractions: often halfway between decimals, or at an interval's end."""
    dtype = DTYPES[name]
    rng, count = np.random.default_rng(), scaled(20_000)
    for power in range(-60, 100, 4):
        integers = rng.integers(0, 2 ** rng.integers(20, 62), count)
        agrees(np.ldexp(integers.astype(np.float64), -power).astype(dtype), name)


# Found by a search through all doubles. Times the power of ten, these are 1e-19 to 2e-19 from the
# middle of two integers, or half a unit beside them from a multiple of ten, but not there.
NEAR_BORDERS = [
    *(0x4D73DE005BD620DF, 0x0D17C0747BD76FA1, 0x612491DAAD0BA280, 0x6159B651584E8B20),
    *(0x619011F2D73116F4, 0x61C4166F8CFD5CB1, 0x2B659A2783CE70AB, 0x613EDAC8039173C0),
    *(0x20E8823A57ADBEF8, 0x20E8823A57ADBEF9, 0x6F53AE60753AF6CA, 0x6F53AE60753AF6CB),
    *(0x10F1D467E94B856E, 0x3086E22DB4568793, 0x030A3D8D5E503E59, 0x7C82240C80BDA7BF),
]


def test_doubles_near_a_border_are_written_as_by_the_pure_way() -> None:
    bits = np.array(NEAR_BORDERS, np.uint64).view(np.int64)
    agrees(bits[:, None] + np.arange(-2, 3), "FP64")


def test_doubles_whose_interval_ends_at_a_shorter_number_are_written_as_by_the_pure_way() -> None:
    """c * 2**q, where (2c - 1) / 2 or (2c + 1) / 2 times 2**q is a multiple of 10**(k + 1)."""
    rng, values = np.random.default_rng(), []
    for q in range(2, 76):
        five = 5 ** len(str(2**q))
        for factor in rng.integers(2**53 // five + 1, 2**54 // five, 20, endpoint=True).tolist():
            odd = five * (factor | 1)
            values += [math.ldexp(odd // 2, q), math.ldexp(odd // 2 + 1, q)]
    agrees(np.array(values), "FP64")


def main(first: int = 0, last: int = 2**32) -> None:
    """Compare the text of all bit patterns of FP32 in a range."""
    for start in range(first, last, 1 << 20):
        bits = np.arange(start, min(start + (1 << 20), last), dtype=np.uint64)
        agrees(bits.astype("<u4"), "FP32")


if __name__ == "__main__":
    main(*(int(argument, 0) for argument in sys.argv[1:]))
