import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.balancer import (
    LEAST_REQUEST,
    LoadBalancingPolicy,
    choose_by_hash,
    choose_endpoint,
    choose_least_request,
)

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
