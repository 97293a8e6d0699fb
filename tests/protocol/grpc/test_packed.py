from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.grpc.packed import decode_varints, encode_varints
from gateway.protocol.grpc.wire import WireError, WireReader
from tests.support.grpc import wire_bytes
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300))

BLOCK = 64 * 1024
"""So many bytes are decoded at a time, and so many numbers encoded."""
INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]


def reference(data: bytes) -> list[int] | None:
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
    expected = reference(data)
    whole = None if expected is None else [1] * before + expected
    assert decoded(b"\x01" * before + data) == whole


@LAW
@given(st.data(), st.sampled_from(INTEGERS), BEFORE)
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
        (b"\x01\x80", "a varint that is cut short at byte 101"),
        (b"\x01" + b"\x80" * 10 + b"\x01", "a varint of more than 10 bytes at byte 101"),
        (b"\x01" + b"\x80" * 50, "a varint of more than 10 bytes at byte 101"),
    ],
)
def test_error_names_the_byte(data: bytes, error: str) -> None:
    with pytest.raises(WireError) as caught:
        list(decode_varints(data, offset=100))
    assert str(caught.value) == error


def peak_of(work: Any) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_of_decoding_does_not_grow_with_the_input() -> None:
    data = b"\x80\x01\x05" * 1_000_000

    def count() -> int:
        return sum(values.size for values in decode_varints(data))

    assert count() == 2_000_000
    assert peak_of(count) < 4_000_000
