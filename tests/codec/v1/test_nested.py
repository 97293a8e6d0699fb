from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given

from gateway.codec.native import collect_marks
from gateway.codec.policies import Nonfinite
from gateway.codec.v1.nested_reader import ShapeFinder
from gateway.codec.v1.nested_writer import (
    BracketWriter,
    NestedBytesEncoder,
    NestedEncoder,
    NestedNumberEncoder,
    check_rank,
)
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from tests.codec import strategies
from tests.codec.reference import pack_bytes
from tests.support.checks.refused import refused, refused_with

LABEL = "output 'y'"


def written(converter: NestedEncoder, pieces: list[bytes]) -> bytes:
    return b"".join([*map(converter.feed, pieces), converter.end()])


def numbers(
    shape: tuple[int, ...], nonfinite: Nonfinite = Nonfinite.LITERAL
) -> NestedNumberEncoder:
    return NestedNumberEncoder(LABEL, DATATYPES["FP32"], shape, nonfinite)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((0,), "[]"), ((2, 0), "[[],[]]"), ((0, 3), "[]"), ((1, 2, 0, 4), "[[[],[]]]")],
)
def test_shapes_without_elements_become_empty_arrays(shape: tuple[int, ...], expected: str) -> None:
    for encoder in (numbers(shape), NestedBytesEncoder(LABEL, shape, as_base64=False)):
        assert written(encoder, [b""]) == expected.encode()


BROKEN: list[tuple[NestedEncoder, bytes, str]] = [
    (numbers((2,)), bytes(7), "ends inside an element"),
    (numbers((2,)), bytes(4), "holds 1 elements or more, its shape [2] takes 2"),
    (
        NestedBytesEncoder(LABEL, (1,), as_base64=False),
        pack_bytes([b"a", b"b"]),
        "holds 2 elements or",
    ),
    (numbers((0,)), bytes(8), "holds 2 elements or more"),
    (NestedBytesEncoder(LABEL, (2, 0), as_base64=False), pack_bytes([b""]), "holds 1 elements or"),
    (NestedBytesEncoder(LABEL, (1,), as_base64=False), b"\x02\0\0\0a", "ends inside an element"),
]


@pytest.mark.parametrize(("converter", "data", "why"), BROKEN)
def test_broken_tensors_are_refused(converter: NestedEncoder, data: bytes, why: str) -> None:
    with refused_with(ErrorKind.BAD_RESPONSE, LABEL, why):
        written(converter, [data])


@pytest.mark.parametrize("shape", [(300, 300, 0), (2**62, 9, 0)])
def test_too_many_empty_arrays_are_refused(shape: tuple[int, ...]) -> None:
    with refused_with(ErrorKind.NOT_ACCEPTABLE, "more than 65536 empty arrays; request it"):
        written(numbers(shape), [b""])


def test_too_many_dimensions_are_refused() -> None:
    check_rank(LABEL, (1,) * 32)
    assert written(numbers((1,) * 32), [bytes(4)]) == b"[" * 32 + b"0.0" + b"]" * 32
    with refused_with(ErrorKind.NOT_ACCEPTABLE, "has 33 dimensions"):
        check_rank(LABEL, (1,) * 33)


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


def find_shape(value: Any, pieces: list[bytes] | None = None) -> tuple[int, ...]:
    finder = ShapeFinder("input 'x'")
    for piece in pieces or [collect_marks(json.dumps(value).encode())]:
        finder.feed(piece)
    return finder.shape(_count(value))


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else 1


def reference_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of nested lists; raises ValueError if they are ragged."""
    if not isinstance(value, list):
        return ()
    shapes = set(map(reference_shape, value))
    if len(shapes) > 1:
        raise ValueError("ragged")
    return (len(value), *(shapes.pop() if shapes else ()))


def make_nested(rng: random.Random, depth: int) -> Any:
    if not depth or rng.random() < 0.05:
        return rng.choice([1, 'a,["', "\\"])
    return [make_nested(rng, depth - 1) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))]


def make_even(rng: random.Random, shape: list[int]) -> Any:
    return [make_even(rng, shape[1:]) for _ in range(shape[0])] if shape else rng.choice([1, "],"])


def make_ragged(rng: random.Random, value: Any) -> Any:
    """Make some array longer or shorter."""
    within = value
    while within and isinstance(within[0], list) and rng.random() < 0.7:
        within = rng.choice(within)
    if within and rng.random() < 0.5:
        within.pop()
    else:
        within.append(rng.choice([1, [], [1], [1, 1]]))
    return value


@pytest.mark.parametrize("way", ["nested", "even", "bent"])
@given(seed=strategies.SEEDS)
@strategies.LAW
def test_shape_equals_the_reference_however_split(way: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        value = [make_nested(rng, 3)]
        if way != "nested":
            value = make_even(rng, [rng.randint(0, 3) for _ in range(rng.randint(1, 4))])
        if way == "bent":
            value = make_ragged(rng, value)
        marks = collect_marks(json.dumps(value).encode())
        for pieces in ([marks], strategies.bytewise(marks), strategies.cut(marks, seed)):
            try:
                found = find_shape(value, pieces)
            except GatewayError:
                with pytest.raises(ValueError, match="ragged"):
                    reference_shape(value)
            else:
                assert found == reference_shape(value)


RAGGED = {
    "[[1,2],[3]]": "at depth 2, array number 1 has 1 items, those before it 2",
    "[[1],[2],[3,4]]": "at depth 2, array number 2 has 2 items, those before it 1",
    "[[[1],[2]],[[3]]]": "at depth 2, array number 1 has 1 items, those before it 2",
    "[1,[2]]": "values stand beside arrays",
    "[[1],2]": "values stand beside arrays",
    "[[1],2,[3]]": "values stand beside arrays",
    "[[1],[[2]]]": "some values are nested deeper than others",
    "[[1],[]]": "some of its arrays are empty",
    "[[],[1]]": "some of its arrays are empty",
}


@pytest.mark.parametrize(("text", "why"), RAGGED.items())
def test_ragged_arrays_are_refused(text: str, why: str) -> None:
    expected = f"input 'x' is no tensor, as its arrays are ragged: {why}"
    with refused(ErrorKind.BAD_REQUEST, expected):
        find_shape(json.loads(text))


def test_single_value_has_an_empty_shape() -> None:
    assert find_shape(5) == ()


def test_more_dimensions_than_the_cap_are_refused() -> None:
    assert find_shape(1, [b"[" * 64 + b"]" * 64]) == (1,) * 64
    with refused(ErrorKind.BAD_REQUEST, "input 'x' has 65 dimensions; at most 64 are allowed"):
        find_shape(1, [b"[" * 65 + b"]" * 65])
