from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given

from gateway.codec.native import collect_marks
from gateway.codec.v1.nested_tensor import ShapeFinder
from gateway.errors import GatewayError
from tests.codec import strategies


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
    with pytest.raises(GatewayError) as caught:
        find_shape(json.loads(text))
    expected = f"input 'x' is no tensor, as its arrays are ragged: {why}"
    assert caught.value.message == expected


def test_single_value_has_an_empty_shape() -> None:
    assert find_shape(5) == ()


def test_more_dimensions_than_the_cap_are_refused() -> None:
    for rank in (64, 65):
        finder = ShapeFinder("input 'x'")
        finder.feed(b"[" * rank + b"]" * rank)
        if rank == 64:
            assert finder.shape(1) == (1,) * 64
            continue
        with pytest.raises(GatewayError) as caught:
            finder.shape(1)
        assert caught.value.message == "input 'x' has 65 dimensions; at most 64 are allowed"
