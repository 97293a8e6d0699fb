from __future__ import annotations

import itertools
from math import nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.weights import (
    CumulativeWeights,
    TrafficSplit,
    WeightedChoice,
    hash_to_fraction,
)

BELOW_ONE = nextafter(1.0, 0.0)


@pytest.mark.parametrize(
    ("weights", "number", "index"),
    [
        ((1, 1), 0.5, 1),
        ((0, 1), 0.0, 1),
        ((1, 0), BELOW_ONE, 0),
        ((2, 3, 5), 0.5, 2),
    ],
)
def test_fraction_falls_into_the_range_of_its_weight(
    weights: tuple[int, ...], number: float, index: int
) -> None:
    assert CumulativeWeights.of(weights).at(number) == index


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=20).filter(any),
    st.floats(0, BELOW_ONE) | st.just(BELOW_ONE),
)
def test_weight_of_0_is_never_chosen(weights: list[int], number: float) -> None:
    assert weights[CumulativeWeights.of(weights).at(number)] > 0


@given(st.text() | st.text(st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF)))
def test_any_text_maps_to_a_fraction(text: str) -> None:
    assert 0.0 <= hash_to_fraction(text) < 1.0
    assert hash_to_fraction(text) == hash_to_fraction(text)


def test_fractions_are_the_same_in_every_process() -> None:
    """Not as those of ``hash``, which differ by PYTHONHASHSEED."""
    assert hash_to_fraction("client-7") == 0.6609696028352976


def test_clients_are_spread_by_weight() -> None:
    shares = CumulativeWeights.of((90, 10))
    canary = sum(shares.at(hash_to_fraction(f"client-{i}")) for i in range(10_000))
    assert 900 < canary < 1100


def test_growing_weight_keeps_its_clients() -> None:
    clients = [hash_to_fraction(str(i)) for i in range(1000)]
    few = {number for number in clients if CumulativeWeights.of((90, 10)).at(number)}
    more = {number for number in clients if CumulativeWeights.of((50, 50)).at(number)}
    assert few < more


def test_choice_that_is_not_taken_stays() -> None:
    drawn = iter("abc")
    choice = WeightedChoice(lambda: next(drawn), "first")
    assert (choice.next, choice.next) == ("first", "first")
    assert [choice.take(), choice.take(), choice.next] == ["first", "a", "b"]
    assert [WeightedChoice(None, "only").take() for _ in range(2)] == ["only", "only"]


def test_traffic_is_split_by_weight_but_for_requests_that_stick() -> None:
    numbers = itertools.cycle((0.1, 0.6, 0.9))
    split = TrafficSplit(("a", "b"), (1, 1), "X-Client", lambda: next(numbers))
    assert [split.choice({}).take() for _ in range(4)] == ["a", "b", "b", "a"]
    sticky = [split.choice({"X-Client": str(client)}).take() for client in range(50)]
    assert set(sticky) == {"a", "b"}
    assert sticky == [split.choice({"X-Client": str(client)}).take() for client in range(50)]
