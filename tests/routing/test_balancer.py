"""Which endpoint or upstream a call takes, and whether it is sent again."""

from __future__ import annotations

import itertools
from math import nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ErrorKind
from gateway.routing.balancer import (
    LEAST_REQUEST,
    LoadBalancingPolicy,
    TrafficSplit,
    WeightedChoice,
    choose_by_hash,
    choose_by_weight,
    choose_endpoint,
    choose_least_request,
    hash_to_fraction,
)
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryBudget, RetryPolicy

NAMES = [f"http://10.0.0.{i}:8000" for i in range(8)]
KEYS = [f"user-{i}" for i in range(2000)]
BUSY = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(BUSY, st.integers(0, 1000))
def test_equally_busy_endpoints_take_turns(outstanding: list[int], counter: int) -> None:
    count = len(outstanding)
    chosen = {choose_least_request(outstanding, counter + i) for i in range(count)}
    assert chosen == {i for i in range(count) if outstanding[i] == min(outstanding)}


@given(st.integers(1, 8), st.integers(0, 1000))
def test_round_robin_chooses_each_endpoint_in_turn(count: int, counter: int) -> None:
    policy, ends = LoadBalancingPolicy(round_robin=True), counter + 2 * count
    chosen = [choose_endpoint(policy, NAMES[:count], [], n, None) for n in range(counter, ends)]
    assert chosen[:count] == chosen[count:]
    assert sorted(chosen[:count]) == list(range(count))


def _owners(names: list[str]) -> dict[str, str]:
    return {key: names[choose_by_hash(names, key)] for key in KEYS}


def test_hash_keys_spread_evenly() -> None:
    owners = list(_owners(NAMES).values())
    for name in NAMES:
        assert 0.7 < owners.count(name) * len(NAMES) / len(KEYS) < 1.3


@pytest.mark.parametrize("left", [0, 5])
def test_only_hash_keys_of_a_leaving_endpoint_move(left: int) -> None:
    before = _owners(NAMES)
    after = _owners(NAMES[:left] + NAMES[left + 1 :])
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if before[key] == NAMES[left]}
    # They spread over all other endpoints.
    assert {after[key] for key in moved} == set(NAMES) - {NAMES[left]}


@given(st.text())
def test_any_text_is_a_hash_key(key: str) -> None:
    assert choose_by_hash(NAMES[:1], key) == 0
    assert choose_by_hash(NAMES, key) == choose_by_hash(NAMES, key)


@pytest.mark.parametrize(
    ("policy", "key", "index"),
    [
        (LEAST_REQUEST, None, 1),
        (LEAST_REQUEST, "k", 1),
        (LoadBalancingPolicy(round_robin=True), None, 2),
        (LoadBalancingPolicy(hash_header="x"), None, 1),
        (LoadBalancingPolicy(hash_header="x"), "k", choose_by_hash(["a", "b", "c"], "k")),
    ],
)
def test_policy_selects_the_algorithm(
    policy: LoadBalancingPolicy, key: str | None, index: int
) -> None:
    assert choose_endpoint(policy, ["a", "b", "c"], [2, 0, 1], 2, key) == index


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
    assert choose_by_weight(list(itertools.accumulate(weights)), number) == index


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=20).filter(any),
    st.floats(0, BELOW_ONE) | st.just(BELOW_ONE),
)
def test_weight_of_0_is_never_chosen(weights: list[int], number: float) -> None:
    assert weights[choose_by_weight(list(itertools.accumulate(weights)), number)] > 0


@given(st.text() | st.text(st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF)))
def test_any_text_maps_to_a_fraction(text: str) -> None:
    assert 0.0 <= hash_to_fraction(text) < 1.0
    assert hash_to_fraction(text) == hash_to_fraction(text)


def test_fractions_are_the_same_in_every_process() -> None:
    """Not as those of ``hash``, which differ by PYTHONHASHSEED."""
    assert hash_to_fraction("client-7") == 0.6609696028352976


def test_clients_are_spread_by_weight() -> None:
    canary = sum(
        choose_by_weight((90, 100), hash_to_fraction(f"client-{i}")) for i in range(10_000)
    )
    assert 900 < canary < 1100


def test_growing_weight_keeps_its_clients() -> None:
    clients = [hash_to_fraction(str(i)) for i in range(1000)]
    few = {number for number in clients if choose_by_weight((90, 100), number)}
    more = {number for number in clients if choose_by_weight((50, 100), number)}
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


NO_RESPONSE = RetryPolicy(no_response=True)


@pytest.mark.parametrize("kind", ErrorKind)
@pytest.mark.parametrize("is_repeatable", [False, True])
def test_only_errors_without_effect_are_retried_unless_the_policy_allows_more(
    kind: ErrorKind, is_repeatable: bool
) -> None:
    unseen = (ErrorKind.EXHAUSTED, ErrorKind.REFUSED, ErrorKind.UNREACHABLE)
    safe = kind in unseen and is_repeatable
    assert SAFE_RETRIES_ONLY.allows(kind, is_repeatable) is safe
    also = kind is ErrorKind.NO_RESPONSE and is_repeatable
    assert NO_RESPONSE.allows(kind, is_repeatable) is (safe or also)


@pytest.mark.parametrize(("requests", "retries"), [(0, 0), (1, 0), (2, 1), (5, 2), (100, 3)])
def test_requests_earn_retries_up_to_min_concurrency(requests: int, retries: int) -> None:
    budget = RetryBudget(share=0.5, min_concurrency=3)
    sent = 0
    while budget.try_spend(sent, 0):
        sent += 1
    allowed = 0
    sent += requests
    while budget.try_spend(sent, 0):
        sent += 1
        allowed += 1
    assert allowed == retries


@pytest.mark.parametrize(
    ("share", "in_flight", "retries"),
    [(0.5, 0, 3), (0.5, 1, 3), (0.5, 300, 153), (1, 10, 13), (0, 300, 3)],
)
def test_budget_saves_up_a_share_of_the_calls_in_flight(
    share: float, in_flight: int, retries: int
) -> None:
    """All calls of one of several servers may fail at once, after many that went well."""
    budget = RetryBudget(share, min_concurrency=3)
    sent = 1000
    while budget.try_spend(sent, in_flight):
        sent += 1
    assert sent == 1000 + retries


@given(st.lists(st.none() | st.integers(0, 1000), max_size=300), st.floats(0, 1), st.integers(0, 9))
def test_retries_never_exceed_their_share_of_requests(
    events: list[int | None], share: float, min_concurrency: int
) -> None:
    """None is a successful request; a number is a failed one with so many calls in flight."""
    budget = RetryBudget(share, min_concurrency)
    requests = retries = in_a_row = most_in_flight = 0
    for in_flight in events:
        if in_flight is None:
            requests += 1
            in_a_row = 0
        else:
            most_in_flight = max(most_in_flight, in_flight)
            again = budget.try_spend(requests + retries, in_flight)
            retries += again
            in_a_row += again
        assert retries <= min_concurrency + share * requests + 1e-6
        assert in_a_row <= min_concurrency + share * most_in_flight + 1e-6
