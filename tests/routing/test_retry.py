import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.retry import RetryBudget


def test_the_reserve_is_there_at_once() -> None:
    budget = RetryBudget(share=0.5, reserve=3)
    assert [budget.retry() for _ in range(5)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(("requests", "retries"), [(0, 0), (1, 0), (2, 1), (5, 2), (100, 3)])
def test_requests_earn_retries_up_to_the_reserve(requests: int, retries: int) -> None:
    budget = RetryBudget(share=0.5, reserve=3)
    while budget.retry():
        pass
    for _ in range(requests):
        budget.request()
    assert sum(budget.retry() for _ in range(10)) == retries


@given(st.lists(st.booleans(), max_size=300), st.floats(0, 1), st.integers(0, 9))
def test_retries_are_a_share_of_the_requests(
    happenings: list[bool], share: float, reserve: int
) -> None:
    budget = RetryBudget(share, reserve)
    requests = retries = 0
    for is_request in happenings:
        if is_request:
            requests += 1
            budget.request()
        else:
            retries += budget.retry()
        assert retries <= reserve + share * requests + 1e-6
