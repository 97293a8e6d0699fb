from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.policies import Nonfinite
from gateway.codec.v1.nested_writer import (
    BracketWriter,
    EmptyTensorEncoder,
    NestedBytesEncoder,
    NestedEncoder,
    NestedNumberEncoder,
    check_rank,
)
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from tests.codec import strategies
from tests.codec.reference import pack_bytes

LABEL = "output 'y'"
SHAPES = st.lists(st.sampled_from([1, 1, 2, 3, 5]), max_size=5).map(tuple)


def written(converter: NestedEncoder, pieces: list[bytes]) -> bytes:
    return b"".join([*map(converter.feed, pieces), converter.end()])


def numbers(
    shape: tuple[int, ...], nonfinite: Nonfinite = Nonfinite.LITERAL
) -> NestedNumberEncoder:
    return NestedNumberEncoder(LABEL, DATATYPES["FP32"], shape, nonfinite)


@given(SHAPES, strategies.SEEDS)
@strategies.LAW
def test_numbers_are_nested_however_they_are_split(shape: tuple[int, ...], seed: int) -> None:
    values = np.random.default_rng(seed).integers(-9, 9, shape).astype("<f4")
    if seed % 2:
        values[...] = np.where(values == 0, np.nan, values)
        values[...] = np.where(values == 1, -np.inf, values)
    data = values.tobytes()
    expected = json.dumps(values.tolist(), separators=(",", ":")).encode()
    for pieces in ([data], strategies.bytewise(data), strategies.cut(data, seed)):
        assert written(numbers(shape), pieces) == expected
        without_nan = expected.replace(b"NaN", b"null").replace(b"-Infinity", b"null")
        assert written(numbers(shape, Nonfinite.NULL), pieces) == without_nan


@given(SHAPES, st.booleans(), strategies.SEEDS)
@strategies.LAW
def test_bytes_elements_are_nested_however_they_are_split(
    shape: tuple[int, ...], as_base64: bool, seed: int
) -> None:
    texts = [("é\\" * 4)[: (seed + i) % 7] for i in range(math.prod(shape))]
    data = pack_bytes([text.encode() for text in texts])
    for pieces in ([data], strategies.bytewise(data), strategies.cut(data, seed)):
        found = json.loads(written(NestedBytesEncoder(LABEL, shape, as_base64), pieces))
        array = np.empty(shape, object)
        array[...] = found if shape else None
        assert array.shape == shape
        if not as_base64 and shape:
            assert array.ravel().tolist() == texts


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((0,), "[]"), ((2, 0), "[[],[]]"), ((0, 3), "[]"), ((1, 2, 0, 4), "[[[],[]]]")],
)
def test_shapes_without_elements_become_empty_arrays(shape: tuple[int, ...], expected: str) -> None:
    assert written(EmptyTensorEncoder(LABEL, shape), [b""]) == expected.encode()


BROKEN: list[tuple[NestedEncoder, bytes, str]] = [
    (numbers((2,)), bytes(7), "ends inside an element"),
    (numbers((2,)), bytes(4), "holds 1 elements or more, its shape [2] takes 2"),
    (
        NestedBytesEncoder(LABEL, (1,), as_base64=False),
        pack_bytes([b"a", b"b"]),
        "holds 2 elements or",
    ),
    (EmptyTensorEncoder(LABEL, (0,)), pack_bytes([b""]), "holds 4 elements or more"),
]


@pytest.mark.parametrize(("converter", "data", "why"), BROKEN)
def test_broken_tensors_are_refused(converter: NestedEncoder, data: bytes, why: str) -> None:
    with pytest.raises(GatewayError) as caught:
        written(converter, [data])
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert LABEL in caught.value.message
    assert why in caught.value.message


@pytest.mark.parametrize("shape", [(300, 300, 0), (2**62, 9, 0)])
def test_too_many_empty_arrays_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(GatewayError, match="more than 65536 empty arrays; request it") as caught:
        written(EmptyTensorEncoder(LABEL, shape), [b""])
    assert caught.value.kind is ErrorKind.NOT_ACCEPTABLE


def test_too_many_dimensions_are_refused() -> None:
    check_rank(LABEL, (1,) * 32)
    assert written(numbers((1,) * 32), [bytes(4)]) == b"[" * 32 + b"0.0" + b"]" * 32
    with pytest.raises(GatewayError, match="has 33 dimensions") as caught:
        check_rank(LABEL, (1,) * 33)
    assert caught.value.kind is ErrorKind.NOT_ACCEPTABLE


class _Counted(int):
    """An index that counts how often it is divided."""

    divisions = 0

    def __mod__(self, other: int) -> int:
        _Counted.divisions += 1
        return int(self) % other


def test_cost_of_brackets_does_not_grow_with_the_rank() -> None:
    for shape in ((1,) * 30 + (64, 8), (64, 8) + (1,) * 30, (2,) * 9 + (1,) * 23):
        brackets = BracketWriter(shape)
        _Counted.divisions = 0
        for index in range(1, 512):
            level = brackets.level_at(_Counted(index))
            levels = [n for n in range(1, len(shape)) if index % brackets.sizes[n] == 0]
            assert level == (levels[0] if levels else len(shape))
            assert _Counted.divisions <= 3 * 512
