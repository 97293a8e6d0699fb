"""The table of the Open Inference Protocol's datatypes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np


class Family(Enum):
    """The JSON type of a datatype's elements."""

    BOOLEAN = "true or false"
    INTEGER = "an integer"
    FLOAT = "a number"
    TEXT = "a string"


@dataclass(frozen=True, slots=True)
class IntegerRange:
    """The least and the largest value of an integer datatype."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """The binary format of a float datatype, in IEEE 754's terms.

    ``mantissa_bits`` counts the stored bits; ``min_exponent`` is that of the least normal number.
    Numbers from ``overflow`` on round to infinity.
    """

    mantissa_bits: int
    min_exponent: int
    overflow: float


@dataclass(frozen=True, slots=True, eq=False)
class Datatype:
    """One datatype of the protocol.

    ``dtype`` is its little-endian numpy dtype; None for BYTES, whose elements are a uint32 length
    and that many bytes. ``struct_code`` is its code in the struct module, if it has one.
    ``integers`` and ``floats`` are set for datatypes of these families.
    """

    name: str
    family: Family
    dtype: np.dtype[Any] | None = None
    struct_code: str | None = None
    integers: IntegerRange | None = None
    floats: FloatFormat | None = None
    size: int | None = field(init=False)
    """Bytes of an element; None if elements differ in size."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", None if self.dtype is None else self.dtype.itemsize)


def integer_datatype(name: str, dtype: Any, struct_code: str | None = None) -> Datatype:
    """Make an integer datatype; raises ValueError for another dtype."""
    limits = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    values = IntegerRange(int(limits.min), int(limits.max))
    return Datatype(name, Family.INTEGER, np.dtype(dtype), struct_code, integers=values)


def float_datatype(name: str, dtype: Any, struct_code: str | None = None) -> Datatype:
    """Make a float datatype; raises ValueError for another dtype."""
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    half_unit = math.ldexp(1, int(info.maxexp) - int(info.nmant) - 2)
    values = FloatFormat(int(info.nmant), int(info.minexp), float(info.max) + half_unit)
    return Datatype(name, Family.FLOAT, np.dtype(dtype), struct_code, floats=values)


DATATYPES = {
    datatype.name: datatype
    for datatype in (
        Datatype("BOOL", Family.BOOLEAN, np.dtype("?")),
        integer_datatype("UINT8", "<u1", "B"),
        integer_datatype("UINT16", "<u2", "H"),
        integer_datatype("UINT32", "<u4", "I"),
        integer_datatype("UINT64", "<u8", "Q"),
        integer_datatype("INT8", "<i1", "b"),
        integer_datatype("INT16", "<i2", "h"),
        integer_datatype("INT32", "<i4", "i"),
        integer_datatype("INT64", "<i8", "q"),
        float_datatype("FP16", "<f2", "e"),
        float_datatype("FP32", "<f4", "f"),
        float_datatype("FP64", "<f8", "d"),
        float_datatype("BF16", ml_dtypes.bfloat16),
        Datatype("BYTES", Family.TEXT),
    )
}
"""Every datatype by name. All code derives from this table what it needs to know of a datatype."""
