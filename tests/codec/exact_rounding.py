"""Rounds numbers in exact rational arithmetic, from the digits of their text."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

# Bits of precision, and the exponents of the smallest and the largest normal number.
FORMATS = {"FP16": (11, -14, 15), "BF16": (8, -126, 127), "FP32": (24, -126, 127)}

_DTYPES: dict[str, Any] = {
    "FP16": "<f2",
    "BF16": ml_dtypes.bfloat16,
    "FP32": "<f4",
    "FP64": "<f8",
}


def rounded(value: Fraction, datatype: str) -> Fraction | None:
    """Round to nearest, ties to even; return None on overflow."""
    precision, least, most = FORMATS[datatype]
    if not value:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    assert 1 <= abs(value) / Fraction(2) ** exponent < 2
    last_bit = Fraction(2) ** (max(exponent, least) - precision + 1)
    result = round(value / last_bit) * last_bit
    return result if abs(result) < Fraction(2) ** (most + 1) else None


def nearest(text: str, datatype: str) -> bytes | None:
    """Return the float nearest to a JSON number; None if it overflows."""
    double = float(text)
    if double == 0 and text.lstrip("-").isdigit():
        double = 0.0  # an integer has no -0
    if datatype != "FP64" and 1e-300 < abs(double) < 1e300:
        value = rounded(Fraction(text), datatype)
        double = math.inf if value is None else math.copysign(float(value), double)
    elif datatype != "FP64" and abs(double) <= 1e-300:
        double = math.copysign(0.0, double)
    if math.isinf(double) or (datatype != "FP64" and abs(double) >= 1e300):
        return None
    return np.array([double]).astype(_DTYPES[datatype]).tobytes()


def tie(significand: int, exponent: int, of: tuple[int, int, int]) -> Fraction:
    """Return the middle of two floats, perhaps subnormal ones, or of the largest and 2^n."""
    precision, least, most = of
    last = min(max(exponent, least), most) - precision
    return Fraction(2 * (significand % 2**precision) + 1) * Fraction(2) ** last


def written(value: Fraction, digits: int, form: int) -> str:
    """Write a number with so many digits, cut off: as integer, decimal or with an exponent."""
    sign, value = "-" if value < 0 else "", abs(value)
    exponent = len(str(value.numerator)) - len(str(value.denominator)) - digits
    whole = int(value / Fraction(10) ** exponent)
    if form == 0:
        return f"{sign}{whole}e{exponent}"
    if form == 1 or not -400 < exponent < 400:
        first, rest = str(whole)[0], str(whole)[1:] or "0"
        return f"{sign}{first}.{rest}E{exponent + len(str(whole)) - 1:+}"
    if exponent >= 0:
        return f"{sign}{whole}{'0' * exponent}{'.0' * (form == 2)}"
    text = str(whole).zfill(1 - exponent)
    return f"{sign}{text[:exponent]}.{text[exponent:]}"
