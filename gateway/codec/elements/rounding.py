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

_DOUBLE_BITS = 52
"""Stored bits of the mantissa of a double."""

_BETWEEN = b"[], \t\n\r"

_DIGITS_TO_ZERO = bytes(ord("0") if chr(code) in "0123456789." else code for code in range(256))
_LONG_NUMBER = b"0" * (MAX_EXACT_LENGTH + 1)
_MANY_DIGITS = b"0" * 700


def read_numbers(data: bytes | memoryview, datatype: Datatype) -> Values:
    """Return elements in binary form as an array of numbers; BF16, which numpy lacks, as FP32."""
    assert datatype.dtype is not None
    values = np.frombuffer(data, datatype.dtype)
    return (values.astype("<u4") << 16).view("<f4") if _is_bits(datatype) else values


def round_text(values: Values, text: bytes, datatype: Datatype) -> Values | None:
    """Round the doubles parsed from an array's text; return None if a number does not fit.

    NaN and infinities stay. The result has the dtype of the datatype.
    """
    floats = datatype.floats
    assert floats is not None
    if _any_finite(values, np.abs(values) > floats.overflow):
        return None  # before ties are examined one by one
    if has_ties(values, datatype):
        values = _resolve_ties(values, text, np.flatnonzero(_find_ties(values, floats)))
    is_beyond = np.abs(values) >= floats.overflow
    return None if _any_finite(values, is_beyond) else round_to(values, datatype)


def _any_finite(values: Values, mask: npt.NDArray[np.bool_]) -> bool:
    # Mostly the mask is empty: counting takes a quarter of the time of any().
    return bool(np.count_nonzero(mask)) and bool(np.isfinite(values[mask]).any())


def has_ties(values: Values, datatype: Datatype) -> bool:
    """Tell whether the text of any double decides how it is rounded."""
    assert datatype.floats is not None
    is_narrower = datatype.floats.mantissa_bits < _DOUBLE_BITS
    return is_narrower and bool(np.count_nonzero(_find_ties(values, datatype.floats)))


def has_many_digits(text: bytes) -> bool:
    """Tell whether a number is so long that orjson 3.13 may round a tie of the least doubles up."""
    return text.translate(_DIGITS_TO_ZERO).find(_MANY_DIGITS) >= 0


def may_decide_ties(text: bytes) -> bool:
    """Tell whether text may decide a tie: whether any number exceeds ``MAX_EXACT_LENGTH``."""
    plain = text.translate(_DIGITS_TO_ZERO)
    # Not ``in``, which raises and drops an error inside CPython before it looks for bytes.
    return plain.find(_LONG_NUMBER) >= 0 or plain.find(b"0e") >= 0 or plain.find(b"0E") >= 0


def round_to(values: Values, datatype: Datatype) -> Values:
    """Round doubles to nearest, ties to even; none may be too large but infinities."""
    assert datatype.dtype is not None
    assert datatype.floats is not None
    if not _is_bits(datatype):
        return values.astype(datatype.dtype)
    # BF16 is the upper half of FP32. In units of its last bit, each number is rounded exactly.
    exponents = (values.view(np.int64) >> _DOUBLE_BITS & 0x7FF) - 1023
    exponents = np.maximum(exponents, datatype.floats.min_exponent)
    units = np.ldexp(1.0, exponents - datatype.floats.mantissa_bits)
    single = (np.rint(values / units) * units).astype("<f4")
    bits: Values = single.view("<u4") >> 16
    return bits.astype(datatype.dtype)


def _is_bits(datatype: Datatype) -> bool:
    """Tell whether numpy has a datatype's floats as bits only."""
    assert datatype.dtype is not None
    return datatype.floats is not None and datatype.dtype.kind != "f"


def _find_ties(values: Values, floats: FloatFormat) -> npt.NDArray[np.bool_]:
    """Mask the doubles that are ties."""
    beyond = _DOUBLE_BITS - floats.mantissa_bits
    ties: npt.NDArray[np.bool_] = (values.view(np.int64) & ((1 << beyond) - 1)) == 1 << (beyond - 1)
    small = np.flatnonzero(np.abs(values) < 2.0**floats.min_exponent)
    if small.size:
        units = np.ldexp(np.abs(values[small]), floats.mantissa_bits - floats.min_exponent)
        ties[small] = units % 1 == 0.5
    return ties


def _resolve_ties(values: Values, text: bytes, offsets: npt.NDArray[np.intp]) -> Values:
    """Move each tie to the side on which the number in the text is, if it differs."""
    codes = np.frombuffer(text, np.uint8)
    bounds = np.concatenate(([-1], _find_separators(codes, values.size), [codes.size - 1]))
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


def _find_separators(codes: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.intp]:
    """Find the offsets that separate the ``count`` elements of an array's text.

    Element number i is behind offset i - 1, and up to offset i; the last may be behind all offsets.
    """
    commas = np.flatnonzero(codes == ord(","))
    if commas.size == count - 1:
        return commas
    # With empty arrays, commas do not count elements; the ends of the elements do.
    between = np.isin(codes, list(_BETWEEN))
    return np.flatnonzero(between[1:] & ~between[:-1])
