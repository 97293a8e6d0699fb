import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ErrorKind
from gateway.routing.retry import CAREFUL, RetryBudget, RetryPolicy

UNANSWERED = RetryPolicy(unanswered=True)


@pytest.mark.parametrize("kind", ErrorKind)
@pytest.mark.parametrize("can_be_repeated", [False, True])
def test_only_what_cannot_have_had_an_effect_unless_more_is_allowed(
    kind: ErrorKind, can_be_repeated: bool
) -> None:
    careful = kind is ErrorKind.UNREACHABLE and can_be_repeated
    assert CAREFUL.after(kind, can_be_repeated) is careful
    also = kind is ErrorKind.UNANSWERED and can_be_repeated
    assert UNANSWERED.after(kind, can_be_repeated) is (careful or also)


def test_the_reserve_is_there_at_once() -> None:
    budget = RetryBudget(share=0, reserve=3)
    assert [budget.retry(1 + sent) for sent in range(5)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(("requests", "retries"), [(0, 0), (1, 0), (2, 1), (5, 2), (100, 3)])
def test_requests_earn_retries_up_to_the_reserve(requests: int, retries: int) -> None:
    budget = RetryBudget(share=0.5, reserve=3)
    sent = 0
    while budget.retry(sent):
        sent += 1
    allowed = 0
    sent += requests
    while budget.retry(sent):
        sent += 1
        allowed += 1
    assert allowed == retries


@given(st.lists(st.booleans(), max_size=300), st.floats(0, 1), st.integers(0, 9))
def test_retries_are_a_share_of_the_requests(
    happenings: list[bool], share: float, reserve: int
) -> None:
    budget = RetryBudget(share, reserve)
    requests = retries = 0
    for is_request in happenings:
        if is_request:
            requests += 1
        else:
            retries += budget.retry(requests + retries)
        assert retries <= reserve + share * requests + 1e-6
