"""Rounds parsed doubles to the floats nearest to the text of the numbers, once.

A double is the one nearest to its text. Rounded to a smaller datatype, it is the float nearest to
the text too, unless it is a tie: exactly halfway between two floats of the datatype. Ties are rare.
For them the text is compared with the tie, and decides.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.protocol.datatypes import Datatype, FloatFormat

Values = npt.NDArray[Any]

MAX_EXACT_LENGTH = 13
"""A tie written in so few bytes, without an exponent, is exactly the number of the text.

Proof: the text t is D/10^f with f ≤ 11 and D < 10^13. The tie d is m/2^k with an odd m < 2^25, as
the datatype has 24 bits at most. They differ by less than 2^-52 d. If k ≤ f, the difference is a
multiple of 10^-f, which is more, unless it is 0. If k > f, it is a multiple of 2^-k 5^-f other than
0; so 5^f > 2^27, and f > 11.
"""

_NUMPY_DTYPES = frozenset(map(np.dtype, ("<f2", "<f4", "<f8")))
"""What numpy itself rounds doubles to, in one step."""

_DOUBLE, _SINGLE = np.dtype("<f8"), np.dtype("<f4")

_BETWEEN = b"[], \t\n\r"
_IS_BETWEEN = np.zeros(256, np.bool_)
_IS_BETWEEN[list(_BETWEEN)] = True

_DIGITS_TO_ZERO = bytes(ord("0") if chr(code) in "0123456789." else code for code in range(256))
_LONG_NUMBER = b"0" * (MAX_EXACT_LENGTH + 1)


def needs_rounding(datatype: Datatype) -> bool:
    """Tell whether doubles may have to be rounded to a datatype."""
    return datatype.floats is not None and datatype.dtype != _DOUBLE


def round_text(values: Values, text: bytes | memoryview, datatype: Datatype) -> Values | None:
    """Round the doubles parsed from an array's text; return None if a number does not fit.

    NaN and infinities stay.
    """
    dtype, floats = datatype.dtype, datatype.floats
    assert dtype is not None
    assert floats is not None
    if dtype == _DOUBLE:
        return values
    # Counting takes a quarter less time than any().
    if dtype in _NUMPY_DTYPES and not np.count_nonzero(_find_normal_ties(values, floats)):
        try:
            # IEEE 754's flags cost nothing. A tie among subnormal floats raises underflow.
            with np.errstate(over="raise", under="raise"):
                return values.astype(dtype)
        except FloatingPointError:
            pass
    ties = np.flatnonzero(_find_ties(values, floats))
    if ties.size:
        if ((np.abs(values) > floats.overflow) & np.isfinite(values)).any():
            return None  # before ties are examined one by one
        values = _resolve_ties(values, text, ties)
    narrow = round_to(values, datatype)
    return narrow if (np.isfinite(narrow) == np.isfinite(values)).all() else None


def has_ties(values: Values, datatype: Datatype) -> bool:
    """Tell whether the text of any double decides how it is rounded."""
    assert datatype.floats is not None
    return needs_rounding(datatype) and bool(_find_ties(values, datatype.floats).any())


def may_decide_ties(text: bytes) -> bool:
    """Tell whether text may decide a tie: whether any number exceeds ``MAX_EXACT_LENGTH``."""
    plain = text.translate(_DIGITS_TO_ZERO)
    # Not ``in``, which raises and drops an error inside CPython before it looks for bytes.
    return plain.find(_LONG_NUMBER) >= 0 or plain.find(b"0e") >= 0 or plain.find(b"0E") >= 0


@np.errstate(over="ignore")
def round_to(values: Values, datatype: Datatype) -> Values:
    """Round doubles to nearest, ties to even; overflow becomes infinity."""
    dtype, floats = datatype.dtype, datatype.floats
    assert dtype is not None
    assert floats is not None
    if dtype in _NUMPY_DTYPES:
        return values.astype(dtype, copy=False)
    # By way of float32, which must not turn other numbers into ties.
    single = values.astype(_SINGLE)
    ties = _find_ties(single, floats)
    if ties.any():
        low, exact = single[ties], values[ties]
        upwards = np.where(exact > low, np.inf, -np.inf).astype(_SINGLE)
        single[ties] = np.where(exact == low, low, np.nextafter(low, upwards))
    return single.astype(dtype)


def _find_normal_ties(values: Values, floats: FloatFormat) -> npt.NDArray[np.bool_]:
    """Mask the doubles, or singles, that are ties, except among subnormal floats of the format."""
    is_double = values.dtype == _DOUBLE
    bits: npt.NDArray[Any] = values.view(np.int64 if is_double else np.int32)
    beyond = (52 if is_double else 23) - floats.mantissa_bits
    ties: npt.NDArray[np.bool_] = (bits & ((1 << beyond) - 1)) == 1 << (beyond - 1)
    return ties


def _find_ties(values: Values, floats: FloatFormat) -> npt.NDArray[np.bool_]:
    """Mask the doubles, or singles, that are ties."""
    ties = _find_normal_ties(values, floats)
    small = np.flatnonzero(np.abs(values) < 2.0**floats.min_exponent)
    if small.size:
        units = np.ldexp(np.abs(values[small]), floats.mantissa_bits - floats.min_exponent)
        ties[small] = units % 1 == 0.5
    return ties


def _resolve_ties(
    values: Values, text: bytes | memoryview, offsets: npt.NDArray[np.intp]
) -> Values:
    """Move each tie to the side on which the number in the text is, if it differs."""
    text = bytes(text)
    codes = np.frombuffer(text, np.uint8)
    bounds = np.concatenate(([-1], find_separators(codes, values.size), [codes.size - 1]))
    # Including a few spaces and brackets around them.
    starts, ends = bounds[offsets] + 1, bounds[offsets + 1] + 1
    is_long = ends - starts > MAX_EXACT_LENGTH
    if b"e" in text or b"E" in text:
        exponents = np.flatnonzero((codes | 0x20) == ord("e"))
        is_long |= np.searchsorted(exponents, starts) != np.searchsorted(exponents, ends)
    offsets, starts, ends = offsets[is_long], starts[is_long], ends[is_long]
    texts = list(map(text.__getitem__, map(slice, starts.tolist(), ends.tolist())))
    # Each distinct number is compared once.
    sides = dict(zip(texts, values[offsets].tolist(), strict=True))
    sides = {number: _nudge_tie(tie, number) for number, tie in sides.items()}
    moved = values.copy()
    moved[offsets] = list(map(sides.__getitem__, texts))
    return moved


def _nudge_tie(tie: float, number: bytes) -> float:
    """Return a tie, or the next double towards the number in the text."""
    exact, tied = Decimal(number.strip(_BETWEEN).decode("ascii")), Decimal(tie)
    if exact == tied:
        return tie
    return math.nextafter(tie, math.inf if exact > tied else -math.inf)


def find_separators(codes: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.intp]:
    """Find the offsets that separate the ``count`` elements of an array's text.

    Element number i is behind offset i - 1, and up to offset i; the last may be behind all offsets.
    """
    commas = np.flatnonzero(codes == ord(","))
    if commas.size == count - 1:
        return commas
    # With empty arrays, commas do not count elements; the ends of the elements do.
    between = _IS_BETWEEN[codes]
    return np.flatnonzero(between[1:] & ~between[:-1])
