import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.balancer import least_outstanding

BUSY = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("outstanding", "turn", "index"),
    [
        ([0], 0, 0),
        ([7], 3, 0),
        ([0, 0], 0, 0),
        ([0, 0], 1, 1),
        ([0, 0], 2, 0),
        ([1, 0], 0, 1),
        ([1, 0], 1, 1),
        ([2, 1, 1], 0, 1),
        ([2, 1, 1], 2, 2),
        ([1, 1, 2], 2, 0),
    ],
)
def test_examples(outstanding: list[int], turn: int, index: int) -> None:
    assert least_outstanding(outstanding, turn) == index


@given(BUSY, st.integers(0, 1000))
def test_none_is_less_busy(outstanding: list[int], turn: int) -> None:
    assert outstanding[least_outstanding(outstanding, turn)] == min(outstanding)


@given(BUSY, st.integers(0, 1000))
def test_all_that_are_equally_busy_get_their_turn(outstanding: list[int], turn: int) -> None:
    count = len(outstanding)
    chosen = {least_outstanding(outstanding, turn + i) for i in range(count)}
    assert chosen == {i for i in range(count) if outstanding[i] == min(outstanding)}


@given(st.integers(1, 8), st.integers(0, 1000))
def test_idle_endpoints_get_equal_shares(count: int, turn: int) -> None:
    chosen = [least_outstanding([0] * count, turn + i) for i in range(3 * count)]
    assert all(chosen.count(i) == 3 for i in range(count))
