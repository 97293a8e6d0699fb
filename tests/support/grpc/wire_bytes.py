"""Hypothesis strategies for protobuf bytes: valid, in every form that is allowed, and broken."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import strategies as st

from gateway.protocol.grpc.wire import WireError, WireReader

FIRST_UNKNOWN = 20
"""From this number on no message has a field."""


@st.composite
def varints(draw: st.DrawFn) -> bytes:
    """Generate a varint, not always of the shortest form, or with bits above the 64th."""
    size = draw(st.one_of(st.integers(1, 3), st.integers(1, 10)))
    return one_varint(draw(st.binary(min_size=size, max_size=size)))


def one_varint(code: bytes) -> bytes:
    """Return bytes as a varint: only the last lacks the upper bit."""
    return bytes(byte | 128 for byte in code[:-1]) + bytes([code[-1] & 127])


def encode(value: int) -> bytes:
    """Encode a varint in the plainest way."""
    code = []
    value %= 2**64
    while value >= 128:
        code.append(value % 128 + 128)
        value //= 128
    return bytes([*code, value])


@st.composite
def _fields(draw: st.DrawFn, depth: int = 0) -> bytes:
    number = draw(st.one_of(st.integers(FIRST_UNKNOWN, 40), st.integers(FIRST_UNKNOWN, 2**29 - 1)))
    kind = draw(st.sampled_from([0, 1, 2, 5, 3] if depth < 3 else [0, 1, 2, 5]))
    tag = encode(number << 3 | kind)
    if kind == 0:
        return tag + draw(varints())
    if kind == 2:
        content = draw(st.binary(max_size=12))
        return tag + encode(len(content)) + content
    if kind == 3:
        inner = draw(st.lists(_fields(depth + 1), max_size=3))
        return tag + b"".join(inner) + encode(number << 3 | 4)
    size = 8 if kind == 1 else 4
    return tag + draw(st.binary(min_size=size, max_size=size))


def messages() -> st.SearchStrategy[bytes]:
    """Generate fields that no message of the protocol has."""
    return st.lists(_fields(), max_size=5).map(b"".join)


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Cut bytes into pieces, some of them empty."""
    at = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True)]


def has_numbers(data: bytes, numbers: Iterable[int]) -> bool:
    """Tell whether a message has one of these fields before its first error."""
    reader = WireReader(data)
    wanted = set(numbers)
    try:
        while tag := reader.next_tag():
            if tag >> 3 in wanted:
                return True
            reader.skip(tag)
    except WireError:
        pass
    return False


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """Generate bytes that were broken in a few places."""
    data = bytearray(draw(valid))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    for _ in range(draw(st.integers(1, 3))):
        at = rng.randrange(len(data) + 1)
        change = draw(st.sampled_from(["cut", "drop", "insert", "flip", "set", "repeat"]))
        if change == "cut":
            del data[at:]
        elif change == "drop":
            del data[at : at + rng.randint(1, 4)]
        elif change == "insert":
            data[at:at] = rng.randbytes(rng.randint(1, 3))
        elif change == "repeat":
            data[at:at] = data[at : at + rng.randint(1, 12)]
        elif at < len(data):
            data[at] = data[at] ^ 1 << rng.randrange(8) if change == "flip" else rng.randrange(256)
    return bytes(data)


def fields_of(data: bytes) -> list[tuple[int, bytes]]:
    """Return number and bytes of each field of a valid message."""
    reader = WireReader(data)
    found = []
    while tag := reader.next_tag():
        found.append((tag >> 3, bytes(reader.skip_raw(tag))))
    return found


def field(number: int, value: bytes | int) -> bytes:
    """Encode a field: length-delimited, or a varint."""
    if isinstance(value, int):
        return encode(number << 3) + encode(value)
    return encode(number << 3 | 2) + encode(len(value)) + value
