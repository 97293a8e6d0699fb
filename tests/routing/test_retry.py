import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ErrorKind
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryBudget, RetryPolicy

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
