from __future__ import annotations

import numpy as np
import pytest

from gateway.protocol.datatypes import DATATYPES, Family

# Binary tensor data extension: the datatypes and the bytes of an element.
TABLE = {
    "BOOL": (Family.BOOLEAN, 1),
    "UINT8": (Family.INTEGER, 1),
    "UINT16": (Family.INTEGER, 2),
    "UINT32": (Family.INTEGER, 4),
    "UINT64": (Family.INTEGER, 8),
    "INT8": (Family.INTEGER, 1),
    "INT16": (Family.INTEGER, 2),
    "INT32": (Family.INTEGER, 4),
    "INT64": (Family.INTEGER, 8),
    "FP16": (Family.FLOAT, 2),
    "FP32": (Family.FLOAT, 4),
    "FP64": (Family.FLOAT, 8),
    "BF16": (Family.FLOAT, 2),
    "BYTES": (Family.TEXT, None),
}


def test_table_has_the_datatypes_of_the_protocol() -> None:
    assert {name: (d.family, d.size) for name, d in DATATYPES.items()} == TABLE
    assert all(name == datatype.name for name, datatype in DATATYPES.items())


@pytest.mark.parametrize(
    ("name", "value", "data"),
    [
        ("BOOL", True, "01"),
        ("UINT16", 0x1234, "3412"),
        ("UINT64", 2**64 - 1, "ff" * 8),
        ("INT8", -1, "ff"),
        ("INT16", -2, "feff"),
        ("INT32", 1, "01000000"),
        ("INT64", -(2**63), "0000000000000080"),
        ("FP16", 1.0, "003c"),
        ("BF16", 1.0, "803f"),
        ("FP32", 1.0, "0000803f"),
        ("FP64", 1.0, "000000000000f03f"),
    ],
)
def test_elements_are_little_endian(name: str, value: object, data: str) -> None:
    assert np.array([value], DATATYPES[name].dtype).tobytes().hex() == data


def test_bytes_has_no_dtype() -> None:
    assert DATATYPES["BYTES"].dtype is None
