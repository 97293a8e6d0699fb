"""Rounds numbers in exact rational arithmetic, and generates those beside the middle of floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from hypothesis import strategies as st

from gateway.protocol.datatypes import DATATYPES

FORMATS = {
    "FP16": (11, -14, 15),
    "BF16": (8, -126, 127),
    "FP32": (24, -126, 127),
    "FP64": (53, -1022, 1023),
}
"""Bits of precision, and the exponents of the smallest and the largest normal number."""


def packed(bits: int, datatype: str) -> bytes:
    """Return the bytes of a float by its bits."""
    return bits.to_bytes(DATATYPES[datatype].size or 0, "little")


def nearest(text: str, datatype: str) -> bytes | None:
    """Round a JSON number to nearest, ties to even; None if it is too large."""
    precision, least, most = FORMATS[datatype]
    double = float(text)  # of which only zeros and infinities are taken
    if math.isinf(double):
        return None
    size = abs(Fraction(Decimal(text))) if double else Fraction(0)
    exponent = least
    if size:
        exponent = max(least, size.numerator.bit_length() - size.denominator.bit_length())
        if exponent > least and size < Fraction(2) ** exponent:
            exponent -= 1
    units = round(size / Fraction(2) ** (exponent - precision + 1))
    bits = units + ((exponent - least) << (precision - 1))  # of 2^precision units, one carries
    if bits >= (most - least + 2) << (precision - 1):
        return None
    is_negative = text.startswith("-") and (bits != 0 or not text[1:].isdigit())
    width = DATATYPES[datatype].size or 0
    return packed(bits | is_negative << (8 * width - 1), datatype)


def middle_above(bits: int, datatype: str) -> Decimal:
    """Return the middle of a float and the next one; for the largest one, where infinity begins."""
    precision, least, _ = FORMATS[datatype]
    field, mantissa = divmod(bits, 2 ** (precision - 1))
    if field:
        mantissa += 2 ** (precision - 1)
    twice = Fraction(2 * mantissa + 1) * Fraction(2) ** (max(field, 1) - 1 + least - precision)
    power = twice.denominator.bit_length() - 1  # of two: as many digits are behind the point
    return Decimal(f"{twice.numerator * 5**power}e-{power}")


def with_point(digits: str, exponent: int, point: int) -> str:
    """Write digits * 10^exponent with so many digits before the point; below 0, zeros behind it."""
    whole = digits[: max(point, 0)].lstrip("0") or "0"
    fraction = "0" * -point + digits[max(point, 0) :]
    exponent += len(digits) - point
    number = f"{whole}.{fraction}" if fraction else whole
    return f"{number}e{exponent}" if exponent else number


@st.composite
def beside_middles(
    draw: st.DrawFn, longest: int = 5000, datatypes: Sequence[str] = tuple(FORMATS)
) -> tuple[str, str]:
    """Generate a datatype, and a number that differs from the middle of two floats by one digit."""
    datatype = draw(st.sampled_from(datatypes))
    precision, least, most = FORMATS[datatype]
    implicit = 2 ** (precision - 1)
    infinity = (most - least + 2) * implicit
    power = st.integers(1, infinity // implicit - 1).map(implicit.__mul__)
    subnormal = st.integers(0, implicit - 1)
    edge = st.sampled_from([0, 1, implicit - 1, implicit, infinity - 2, infinity - 1])
    beside_power = power.map(lambda bits: bits - 1)
    normal = st.integers(0, infinity - 1)
    bits = draw(normal | subnormal | power | beside_power | edge)
    _, integers, exponent = middle_above(bits, datatype).as_tuple()
    assert isinstance(exponent, int)
    digits = "".join(map(str, integers))
    zeros = draw(st.sampled_from([0, 0, 1, 19, 60]) | st.integers(0, 60) | st.just(longest))
    kind = draw(st.sampled_from(["at it", "above", "below", "cut off"]))
    if kind == "above":
        digits += "0" * zeros + "1"
    elif kind == "below":
        digits = str(int(digits) - 1).zfill(len(digits)) + "9" * (zeros + 1)
    elif kind == "at it":
        digits += "0" * zeros
    else:
        digits = digits[: draw(st.integers(1, len(digits)))]
    exponent -= len(digits) - len(integers)
    points = st.sampled_from([1, len(digits), len(digits) + exponent]) | st.integers(-400, 1200)
    point = min(draw(points), len(digits))
    return datatype, draw(st.sampled_from(["", "-"])) + with_point(digits, exponent, point)
