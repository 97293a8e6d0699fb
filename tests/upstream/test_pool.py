import pytest

from gateway.upstream.pool import Pool
from tests.servers.doubles import Log, ScriptedEndpoint


def _pool(count: int) -> Pool:
    return Pool([ScriptedEndpoint(Log(), url=f"http://{number}") for number in range(count)])


def test_one_endpoint_takes_all() -> None:
    pool = _pool(1)
    with pool.endpoint() as first, pool.endpoint() as second:
        assert first is second
        assert pool.outstanding == [2]
    assert pool.outstanding == [0]


def test_idle_endpoints_take_turns() -> None:
    pool = _pool(3)
    urls = []
    for _ in range(6):
        with pool.endpoint() as endpoint:
            urls.append(endpoint.url[-1])
    assert "".join(urls) == "012012"


def test_the_least_busy_goes_first() -> None:
    pool = _pool(2)
    with pool.endpoint() as busy, pool.endpoint() as other:
        assert other is not busy
        with pool.endpoint():
            assert sorted(pool.outstanding) == [1, 2]
    with pool.endpoint() as busy:
        for _ in range(4):
            with pool.endpoint() as endpoint:
                assert endpoint is not busy


def test_it_is_given_back_whatever_happens() -> None:
    pool = _pool(1)
    with pytest.raises(KeyError), pool.endpoint():
        raise KeyError
    assert pool.outstanding == [0]


def test_a_loan_lasts_until_it_is_given_back() -> None:
    pool = _pool(1)
    loans = [pool.endpoint() for _ in range(2)]
    assert pool.outstanding == [0]
    assert loans[0].take() is loans[1].take()
    assert pool.outstanding == [2]
    for left, loan in ((1, loans[0]), (0, loans[1])):
        loan.give_back()
        assert pool.outstanding == [left]
