"""Decodes JSON arrays of numbers into binary elements, without a Python object for each.

In a compiled gateway, the C module ``_native`` does it in one pass. Otherwise, and for what C
leaves, pysimdjson parses into a buffer, and numpy rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import simdjson

from gateway.codec.elements.rounding import Values, round_text
from gateway.codec.native import DATATYPE_CODES, decode_numbers
from gateway.protocol.datatypes import Datatype

PARSE_ERRORS = (ValueError, TypeError, RuntimeError)
"""What simdjson and orjson raise for invalid text."""

_PARSER = simdjson.Parser()
"""Reused, as its memory is a dozen times the text: a new parser takes five times as long."""

_MAX_REUSED = 272 * 1024
"""A window of numbers with its brackets. Larger texts get a parser of their own: the reused one
would keep too much memory."""


def fast_decode_numbers(text: bytes | memoryview, datatype: Datatype) -> bytes | None:
    """Decode a JSON array, nested or flat, of integers or floats.

    Returns None if anything needs a closer look: elements that are no such numbers, do not fit, or
    are not JSON. The C module also reads the bare NaN, Infinity and -Infinity that clients write.
    """
    elements = native_decode(text, datatype)
    return pure_decode_numbers(text, datatype) if elements is None else elements


def native_decode(
    text: bytes | memoryview,
    datatype: Datatype,
    open_before: int = 0,
    open_after: int = 0,
    null_is_nan: bool = False,
) -> bytes | None:
    """Decode a JSON array, or a part of one, with the C module; also booleans.

    The text may lack so many opening and closing brackets. With ``null_is_nan``, null is NaN among
    floats. Returns None if nothing is compiled, or if C is not sure of anything in the text.
    """
    code = native_code(datatype)
    if decode_numbers is None or code is None:
        return None
    return decode_numbers(text, code, open_before, open_after, null_is_nan)


def native_code(datatype: Datatype) -> int | None:
    """Return the C module's code of a datatype; None for BYTES, or if nothing is compiled."""
    return DATATYPE_CODES.get(datatype.name)


def pure_decode_numbers(text: bytes | memoryview, datatype: Datatype) -> bytes | None:
    """Do what ``fast_decode_numbers`` does, without the C module."""
    form = _parse_format(datatype)
    try:
        values = parse_numbers(text, form.parsed_type)
    except PARSE_ERRORS:
        return None
    if form.is_parsed_dtype:
        return values.tobytes()
    if form.parsed_type == "d":
        rounded = round_text(values, text, datatype)
        return None if rounded is None else rounded.tobytes()
    narrow = values.astype(form.dtype)
    return narrow.tobytes() if b"\0" not in (narrow == values).tobytes() else None


def parse_numbers(text: bytes | memoryview, parsed_type: Literal["d", "i", "u"]) -> Values:
    """Parse an array into doubles or 64-bit integers; raises PARSE_ERRORS."""
    array = simd_parse(text)
    try:
        assert isinstance(array, simdjson.Array)  # the text begins with a bracket
        return np.frombuffer(array.as_buffer(of_type=parsed_type), _PARSED_DTYPES[parsed_type])
    finally:
        del (
            array
        )  # an error would keep it alive by this frame, and the parser refuses to run meanwhile


def simd_parse(text: bytes | memoryview) -> object:
    """Parse JSON; release the result before the next call. Raises PARSE_ERRORS."""
    parser = _PARSER if len(text) <= _MAX_REUSED else simdjson.Parser()
    return parser.parse(text)


_PARSED_DTYPES = {"d": np.dtype("<f8"), "i": np.dtype("<i8"), "u": np.dtype("<u8")}


@dataclass(frozen=True, slots=True)
class _ParseFormat:
    """How the elements of a datatype are parsed and stored."""

    parsed_type: Literal["d", "i", "u"]
    dtype: np.dtype[Any]
    is_parsed_dtype: bool


@cache
def _parse_format(datatype: Datatype) -> _ParseFormat:
    assert datatype.dtype is not None
    parsed_type: Literal["d", "i", "u"] = "d"
    if datatype.integers is not None:
        parsed_type = "u" if datatype.integers.least == 0 else "i"
    dtype = datatype.dtype
    return _ParseFormat(parsed_type, dtype, dtype == _PARSED_DTYPES[parsed_type])
