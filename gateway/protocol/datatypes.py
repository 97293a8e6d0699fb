"""Open Inference Protocol datatypes and their numpy dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np


class Family(Enum):
    """What JSON value an element of a datatype is written as."""

    BOOLEAN = "true or false"
    INTEGER = "an integer"
    FLOAT = "a number"
    TEXT = "a string"


@dataclass(frozen=True, slots=True)
class Datatype:
    """One datatype of the protocol.

    ``dtype`` is its little-endian numpy dtype; None for BYTES, whose elements are a uint32
    length and that many bytes. ``size`` is bytes per element; None for BYTES.
    """

    name: str
    family: Family
    dtype: np.dtype[Any] | None

    @property
    def size(self) -> int | None:
        """Give the bytes of one element, None where elements differ in size."""
        return None if self.dtype is None else self.dtype.itemsize


def _table() -> dict[str, Datatype]:
    numpy_names = {
        "BOOL": (Family.BOOLEAN, "?"),
        "UINT8": (Family.INTEGER, "<u1"),
        "UINT16": (Family.INTEGER, "<u2"),
        "UINT32": (Family.INTEGER, "<u4"),
        "UINT64": (Family.INTEGER, "<u8"),
        "INT8": (Family.INTEGER, "<i1"),
        "INT16": (Family.INTEGER, "<i2"),
        "INT32": (Family.INTEGER, "<i4"),
        "INT64": (Family.INTEGER, "<i8"),
        "FP16": (Family.FLOAT, "<f2"),
        "FP32": (Family.FLOAT, "<f4"),
        "FP64": (Family.FLOAT, "<f8"),
    }
    table = {
        name: Datatype(name, family, np.dtype(dtype))
        for name, (family, dtype) in numpy_names.items()
    }
    table["BF16"] = Datatype("BF16", Family.FLOAT, np.dtype(ml_dtypes.bfloat16))
    table["BYTES"] = Datatype("BYTES", Family.TEXT, None)
    return table


DATATYPES = _table()
