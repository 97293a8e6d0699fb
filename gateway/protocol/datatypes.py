"""The table of the Open Inference Protocol's datatypes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

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
    and that many bytes. numpy has no BF16: its dtype is that of its bits. ``integers`` and
    ``floats`` are set for datatypes of these families.
    """

    name: str
    family: Family
    dtype: np.dtype[Any] | None = None
    integers: IntegerRange | None = None
    floats: FloatFormat | None = None
    size: int | None = field(init=False)
    """Bytes of an element; None if elements differ in size."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", None if self.dtype is None else self.dtype.itemsize)


def integer_datatype(name: str, dtype: str) -> Datatype:
    """Make an integer datatype; raises ValueError for another dtype."""
    limits = np.iinfo(dtype)
    values = IntegerRange(int(limits.min), int(limits.max))
    return Datatype(name, Family.INTEGER, np.dtype(dtype), integers=values)


def float_datatype(name: str, dtype: str, floats: FloatFormat) -> Datatype:
    """Make a float datatype, in which numpy computes or of which it has the bits."""
    return Datatype(name, Family.FLOAT, np.dtype(dtype), floats=floats)


DATATYPES: Final = {
    datatype.name: datatype
    for datatype in (
        Datatype("BOOL", Family.BOOLEAN, np.dtype("?")),
        *(integer_datatype(f"UINT{8 * size}", f"<u{size}") for size in (1, 2, 4, 8)),
        *(integer_datatype(f"INT{8 * size}", f"<i{size}") for size in (1, 2, 4, 8)),
        float_datatype("FP16", "<f2", FloatFormat(10, -14, 65520.0)),
        float_datatype("FP32", "<f4", FloatFormat(23, -126, 2.0**128 - 2.0**103)),
        float_datatype("FP64", "<f8", FloatFormat(52, -1022, math.inf)),
        float_datatype("BF16", "<u2", FloatFormat(7, -126, 2.0**128 - 2.0**119)),
        Datatype("BYTES", Family.TEXT),
    )
}
"""Every datatype by name. All code derives from this table what it needs to know of a datatype."""
