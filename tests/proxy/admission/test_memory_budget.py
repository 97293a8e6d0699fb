import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.system.buffers import MIN_STREAM_BYTES, STALLED_ALONE, BufferShare
from tests.support.checks.refused import refused_with
from tests.system.arriving_body import ArrivingBody, client_share, ended


def test_all_calls_share_the_cap() -> None:
    budget = MemoryBudget(100)
    with budget.reserve() as one, budget.reserve() as other:
        one.resize(60)
        other.resize(40)
        with pytest.raises(GatewayError) as caught:
            one.resize(61)
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert caught.value.retry_after == 1
        assert "buffers 100 bytes" in caught.value.message
        assert (
            "at most 100 bytes may be buffered (limits.max_buffered_bytes)" in caught.value.message
        )
        other.resize(39)
        one.resize(61)
    assert budget.total == 0


def test_grown_reservation_adds_up() -> None:
    budget = MemoryBudget(100)
    with budget.reserve() as one, budget.reserve() as other:
        one.grow(60)
        other.grow(30)
        one.grow(10)
        with pytest.raises(GatewayError):
            other.grow(1)
        assert budget.total == 100
    assert budget.total == 0


def test_new_cap_counts_existing_reservations() -> None:
    budget = MemoryBudget(100)
    with budget.reserve() as one, budget.reserve() as other:
        one.resize(100)
        budget.set_limit(120)
        other.resize(20)
        budget.set_limit(50)
        for size in (90, 30):
            one.resize(size)
            with pytest.raises(GatewayError, match="at most 50 bytes may be buffered"):
                other.grow(1)
        one.resize(0)
        other.resize(50)
    assert budget.total == 0


async def test_as_many_streams_that_stall_end_as_a_call_needs() -> None:
    budget = MemoryBudget(10 * MIN_STREAM_BYTES)
    bodies = [ArrivingBody(client_share(budget.buffers), 2 * STALLED_ALONE) for _ in range(8)]
    moving = BufferShare(budget.buffers)
    moving.open_stream(ArrivingBody())
    with budget.reserve() as one:
        one.resize(MIN_STREAM_BYTES)
        budget.check_admission()
        assert len(await ended(bodies)) == 1
        budget.check_admission()
        assert len(await ended(bodies)) == 1
        one.resize(2 * MIN_STREAM_BYTES)
        budget.set_limit(9 * MIN_STREAM_BYTES)
        budget.check_admission()
        assert len(await ended(bodies)) == 3
        one.resize(2 * MIN_STREAM_BYTES + 1)
        budget.buffers.reserved += 6 * MIN_STREAM_BYTES
        with pytest.raises(GatewayError):
            budget.check_admission()
        assert len(await ended(bodies)) == 8
        budget.buffers.reserved -= 6 * MIN_STREAM_BYTES


async def test_call_is_refused_where_no_stream_stalls() -> None:
    budget = MemoryBudget(2 * MIN_STREAM_BYTES)
    bodies = [ArrivingBody(client_share(budget.buffers)) for _ in range(2)]
    with refused_with(ErrorKind.OVERLOADED):
        budget.check_admission()
    assert not await ended(bodies)
