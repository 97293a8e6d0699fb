"""The text of an array of numbers → little-endian bytes, in a few calls.

No Python object is made for an element: pysimdjson's buffers hold them, and numpy rounds them.
Where the gateway is compiled, C of our own does both in one go for most floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import simdjson

from gateway.codec.elements.rounding import Values, round_text
from gateway.protocol.datatypes import Datatype

_read_floats: Callable[[bytes | memoryview, int], bytes | None] | None
try:
    from gateway.codec.elements._floats import read_floats as _read_floats
except ImportError:  # not compiled
    _read_floats = None

PARSE_ERRORS = (ValueError, TypeError, RuntimeError)
"""What simdjson and orjson raise for text that is not what it should be."""

_PARSER = simdjson.Parser()
"""Kept: its memory, some dozen times the text, takes a fifth of the time where it is new."""

_MAX_REUSED = 256 * 1024
"""Bytes of text for which it is: for larger ones it would keep too much."""


def fast_decode_numbers(text: bytes | memoryview, datatype: Datatype) -> bytes | None:
    """Convert a JSON array, nested or flat, to elements of a datatype of integers or floats.

    Gives None where that takes a closer look: at what is no such number, does not fit, or is not
    known to JSON. C knows the bare NaN, Infinity and -Infinity that clients write.
    """
    form = _parse_format(datatype)
    if _read_floats is not None and form.dtype in _C_DTYPES:
        floats = _read_floats(text, form.dtype.itemsize)
        if floats is not None:
            return floats
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


def has_c_decoder(datatype: Datatype) -> bool:
    """Tell whether plain numbers of a datatype are read in C, which takes a few at once too."""
    return _read_floats is not None and datatype.dtype in _C_DTYPES


def parse_numbers(text: bytes | memoryview, parsed_type: Literal["d", "i", "u"]) -> Values:
    """Parse an array into doubles or integers of 64 bits; raises REFUSALS."""
    array = simd_parse(text)
    try:
        assert isinstance(array, simdjson.Array)  # the text starts with a bracket
        return np.frombuffer(array.as_buffer(of_type=parsed_type), _PARSED_DTYPES[parsed_type])
    finally:
        del array  # an error holds this frame, and while there is an array, nothing else is parsed


def simd_parse(text: bytes | memoryview) -> object:
    """Parse JSON, of which nothing may be left when the next is parsed; raises REFUSALS."""
    parser = _PARSER if len(text) <= _MAX_REUSED else simdjson.Parser()
    return parser.parse(text)


_C_DTYPES = frozenset((np.dtype("<f4"), np.dtype("<f8")))
_PARSED_DTYPES = {"d": np.dtype("<f8"), "i": np.dtype("<i8"), "u": np.dtype("<u8")}


@dataclass(frozen=True, slots=True)
class _ParseFormat:
    """How the elements of a datatype are parsed, and kept."""

    parsed_type: Literal["d", "i", "u"]
    dtype: np.dtype[Any]
    is_parsed_dtype: bool


@cache
def _parse_format(datatype: Datatype) -> _ParseFormat:
    assert datatype.dtype is not None
    parsed_type: Literal["d", "i", "u"] = "d"
    if datatype.integers is not None:
        parsed_type = "u" if datatype.integers.least == 0 else "i"
    return _ParseFormat(parsed_type, datatype.dtype, datatype.dtype == _PARSED_DTYPES[parsed_type])
