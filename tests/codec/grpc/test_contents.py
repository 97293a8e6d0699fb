"""Typed contents in every form that protobuf allows, against the official runtime."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.codec.grpc.contents import (
    HeaderBudget,
    TensorLabel,
    decode_varints,
    encode_varints,
    read_contents,
)
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.wire import WireError, WireReader
from tests.codec.grpc.infer_messages import FIELDS, canonical, raw_data
from tests.codec.reference import DTYPES
from tests.support.grpc import wire_bytes
from tests.support.grpc.proto_file import InferTensorContents
from tests.support.grpc.wire_bytes import field
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(600))

NUMBERS = {each.name: each.number for each in InferTensorContents.DESCRIPTOR.fields}
SIZES = {"fp32_contents": 4, "fp64_contents": 8}


@st.composite
def contents_of(draw: st.DrawFn, datatype: str) -> bytes:
    """Generate the field of a datatype: packed, unpacked, and in several parts."""
    name = FIELDS[datatype]
    number = NUMBERS[name]
    size = SIZES.get(name)
    if name == "bytes_contents":
        return b"".join(field(number, value) for value in draw(st.lists(st.binary(max_size=5))))
    element = wire_bytes.varints() if size is None else st.binary(min_size=size, max_size=size)
    small = st.integers(0, 100).map(lambda value: bytes([value]))
    if size is None:
        element = draw(st.sampled_from([small, small | element]))
    wire_type = {None: 0, 4: 5, 8: 1}[size]
    parts = []
    for elements in draw(st.lists(st.lists(element, max_size=6), max_size=4)):
        if draw(st.booleans()):
            parts.append(field(number, b"".join(elements)))
        else:
            tag = wire_bytes.encode(number << 3 | wire_type)
            parts += [tag + each for each in elements]
        parts.append(draw(st.sampled_from([b"", b"", field(30, 1)])))
    return b"".join(parts)


def read(datatype: str, data: bytes, count: int) -> bytes | None:
    """Return the data of a tensor; None if they are refused."""
    label = TensorLabel("input 'x'", DATATYPES[datatype], (count,), REQUEST)
    try:
        budget = HeaderBudget(1 << 20, 100, REQUEST)
        return b"".join(read_contents(label, data, (0, len(data)), budget))
    except (WireError, GatewayError):
        return None


def expected(datatype: str, message: Any) -> bytes | None:
    """Return the data as the runtime reads them; None if an element does not fit."""
    values = list(getattr(message, FIELDS[datatype]))
    if datatype in DTYPES and values and DATATYPES[datatype].integers is not None:
        limits = np.iinfo(DTYPES[datatype])
        if min(values) < limits.min or max(values) > limits.max:
            return None
    return canonical(datatype, raw_data(datatype, values))


@LAW
@given(st.data(), st.sampled_from([*FIELDS]), st.booleans())
def test_contents_of_any_form_are_read_as_the_runtime_does(
    data: st.DataObject, datatype: str, is_broken: bool
) -> None:
    codes = contents_of(datatype)
    code = data.draw(wire_bytes.mutated(codes) if is_broken else codes)
    try:
        message = InferTensorContents.FromString(code)
    except DecodeError:
        for count in range(8):
            assert read(datatype, code, count) is None
        return
    count = len(getattr(message, FIELDS[datatype]))
    others = [
        each for each, values in message.ListFields() if each.name != FIELDS[datatype] and values
    ]
    wanted = None if others else expected(datatype, message)
    assert canonical(datatype, read(datatype, code, count)) == wanted


def test_any_number_but_zero_is_true() -> None:
    assert read("BOOL", field(1, b"\x02\x00\x80\x01"), 3) == b"\1\0\1"


def test_packed_field_that_ends_within_an_element_is_refused() -> None:
    assert read("FP32", field(NUMBERS["fp32_contents"], bytes(6)), 1) is None
    assert read("INT64", field(NUMBERS["int64_contents"], b"\1\x80"), 1) is None


# ---------------------------------------------------------------------------- packed varints

BLOCK = 64 * 1024
"""So many bytes are decoded at a time, and so many numbers encoded."""


def read_one_by_one(data: bytes) -> list[int] | None:
    """Decode one varint after the other; None if one is invalid."""
    reader = WireReader(data)
    found = []
    try:
        while reader.position < reader.end:
            found.append(reader.read_varint())
    except WireError:
        return None
    return found


def decoded(data: bytes) -> list[int] | None:
    try:
        return [value for values in decode_varints(data) for value in values.tolist()]
    except WireError:
        return None


def packed_varints() -> st.SearchStrategy[bytes]:
    forms = st.one_of(wire_bytes.varints(), st.integers(0, 127).map(lambda value: bytes([value])))
    return st.one_of(
        st.lists(forms, max_size=40).map(b"".join),
        # Of one length, which has a way of its own.
        st.integers(1, 10).flatmap(
            lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=20).map(
                lambda codes: b"".join(map(wire_bytes.one_varint, codes))
            )
        ),
    )


# Varints of one byte before those of interest: these lie across the end of a block then.
BEFORE = st.sampled_from([0, *(BLOCK - rest for rest in (0, 1, 2, 5, 9, 30))])


@LAW
@given(packed_varints() | wire_bytes.mutated(packed_varints()), BEFORE)
def test_packed_varints_are_those_read_one_by_one(data: bytes, before: int) -> None:
    whole = read_one_by_one(data)
    assert decoded(b"\x01" * before + data) == (None if whole is None else [1] * before + whole)


@LAW
@given(st.data(), st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]), BEFORE)
def test_integers_are_encoded_as_the_plainest_way_does(
    data: st.DataObject, dtype: str, before: int
) -> None:
    limits = np.iinfo(dtype)
    numbers = st.one_of(st.integers(int(limits.min), int(limits.max)), st.integers(0, 127))
    values = data.draw(st.lists(numbers, max_size=20))
    code = b"".join(encode_varints(np.array([1] * before + values, dtype)))
    assert code == b"\x01" * before + b"".join(map(wire_bytes.encode, values))
    assert decoded(code) == [1] * before + [value % 2**64 for value in values]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x01\x80", "a varint that is cut short at byte 1"),
        (b"\x01" + b"\x80" * 10 + b"\x01", "a varint of more than 10 bytes at byte 1"),
        (b"\x01" + b"\x80" * 50, "a varint of more than 10 bytes at byte 1"),
    ],
)
def test_error_of_packed_varints_names_the_byte(data: bytes, error: str) -> None:
    with pytest.raises(WireError, match=f"^{error}$"):
        list(decode_varints(data))


def test_memory_of_decoding_does_not_grow_with_the_input() -> None:
    data = b"\x80\x01\x05" * 1_000_000
    tracemalloc.start()
    try:
        assert sum(values.size for values in decode_varints(data)) == 2_000_000
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
