import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ErrorKind
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryBudget, RetryPolicy

NO_RESPONSE = RetryPolicy(no_response=True)


@pytest.mark.parametrize("kind", ErrorKind)
@pytest.mark.parametrize("is_repeatable", [False, True])
def test_only_what_cannot_have_had_an_effect_unless_more_is_allowed(
    kind: ErrorKind, is_repeatable: bool
) -> None:
    careful = kind in (ErrorKind.EXHAUSTED, ErrorKind.UNREACHABLE) and is_repeatable
    assert SAFE_RETRIES_ONLY.after(kind, is_repeatable) is careful
    also = kind is ErrorKind.NO_RESPONSE and is_repeatable
    assert NO_RESPONSE.after(kind, is_repeatable) is (careful or also)


def test_the_reserve_is_there_at_once() -> None:
    budget = RetryBudget(share=0, reserve=3)
    assert [budget.retry(1 + sent, 0) for sent in range(5)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(("requests", "retries"), [(0, 0), (1, 0), (2, 1), (5, 2), (100, 3)])
def test_requests_earn_retries_up_to_the_reserve(requests: int, retries: int) -> None:
    budget = RetryBudget(share=0.5, reserve=3)
    sent = 0
    while budget.retry(sent, 0):
        sent += 1
    allowed = 0
    sent += requests
    while budget.retry(sent, 0):
        sent += 1
        allowed += 1
    assert allowed == retries


@pytest.mark.parametrize(
    ("share", "under_way", "retries"),
    [(0.5, 0, 3), (0.5, 1, 3), (0.5, 300, 153), (1, 10, 13), (0, 300, 3)],
)
def test_a_share_of_what_is_under_way_is_saved_up(
    share: float, under_way: int, retries: int
) -> None:
    """All that one of several servers has may fail at once, after many that went well."""
    budget = RetryBudget(share, reserve=3)
    sent = 1000
    while budget.retry(sent, under_way):
        sent += 1
    assert sent == 1000 + retries


def test_what_was_saved_up_is_not_lost_as_less_is_under_way() -> None:
    budget = RetryBudget(share=0.5, reserve=3)
    under_way = 300
    sent = 1000
    while budget.retry(sent, under_way):
        sent += 1
        under_way -= 3
    assert sent == 1153


@given(st.lists(st.none() | st.integers(0, 1000), max_size=300), st.floats(0, 1), st.integers(0, 9))
def test_retries_are_a_share_of_the_requests(
    happenings: list[int | None], share: float, reserve: int
) -> None:
    """However many are under way; None is a request that goes well, a number one that fails."""
    budget = RetryBudget(share, reserve)
    requests = retries = in_a_row = most_under_way = 0
    for under_way in happenings:
        if under_way is None:
            requests += 1
            in_a_row = 0
        else:
            most_under_way = max(most_under_way, under_way)
            again = budget.retry(requests + retries, under_way)
            retries += again
            in_a_row += again
        assert retries <= reserve + share * requests + 1e-6
        assert in_a_row <= reserve + share * most_under_way + 1e-6
