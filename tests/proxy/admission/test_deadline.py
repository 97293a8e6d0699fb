import asyncio
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from gateway.errors import ErrorKind, GatewayError, ServerName
from gateway.proxy.admission.deadline import Deadline, request_timeout_text
from tests.support.doubles.clock import Clock

SHORT = 0.02
LONG = 60.0
FOR_THE_ANSWER = 5.0
URL = "http://server:8000"
SERVER = ServerName(URL, "upstream 'servers'")
SPENT = f"waiting for {URL}: not done in {LONG:g} s (limits.request_timeout)"


LIMITS = pytest.mark.parametrize(
    ("idle_timeout", "request_timeout", "limit"),
    [(SHORT, LONG, "limits.idle_timeout"), (LONG, SHORT, "limits.request_timeout")],
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


async def _waiting(
    note: Callable[[Deadline], object],
    idle_timeout: float = SHORT,
    request_timeout: float = LONG,
    spent: float = 0,
) -> GatewayError:
    """Set an expectation and wait; return the error that ends the wait."""

    async def run() -> None:
        with Deadline(idle_timeout, request_timeout, spent) as deadline:
            note(deadline)
            await asyncio.sleep(LONG)

    with pytest.raises(GatewayError) as caught:
        await asyncio.wait_for(run(), 5)
    return caught.value


def _expect_server(deadline: Deadline) -> None:
    deadline.expect_server(SERVER)


@LIMITS
@pytest.mark.parametrize(
    ("note", "kind", "whom"),
    [
        (bool, ErrorKind.CLIENT_TIMEOUT, "the client"),  # the client is expected first
        (_expect_server, ErrorKind.SERVER_TIMEOUT, URL),
    ],
)
async def test_timeout_names_the_expected_peer(
    note: Callable[[Deadline], object],
    kind: ErrorKind,
    whom: str,
    idle_timeout: float,
    request_timeout: float,
    limit: str,
) -> None:
    error = await _waiting(note, idle_timeout, request_timeout)
    assert error.kind is kind
    assert error.message.startswith(f"waiting for {whom}: ")
    assert f"{SHORT:g} s ({limit})" in error.message


async def test_expectation_after_the_timeout_changes_nothing() -> None:
    async def run() -> None:
        with Deadline(SHORT, LONG) as deadline:
            try:
                await asyncio.sleep(LONG)
            finally:
                deadline.expect_client()

    with pytest.raises(GatewayError, match=r"idle_timeout"):
        await run()


@pytest.mark.parametrize("parts", [False, True])
async def test_cancellation_is_not_a_timeout(parts: bool) -> None:
    async def run() -> None:
        deadline = Deadline(LONG, LONG)
        with deadline, deadline.suspended_for_parts() if parts else nullcontext():
            await asyncio.sleep(LONG)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_client_that_leaves_with_the_timeout_has_left(clock: Clock) -> None:
    async def run() -> None:
        with Deadline(LONG, LONG):
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    clock.advance(LONG)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("spent", [LONG - SHORT, LONG, LONG + 1])
async def test_spent_time_counts_towards_the_request_timeout(spent: float) -> None:
    error = await _waiting(_expect_server, LONG, LONG, spent)
    assert error.kind is ErrorKind.SERVER_TIMEOUT
    assert error.message == SPENT


@pytest.mark.parametrize(
    ("grace", "pieces", "slow"),
    [
        (10.0, [(11.0, 100)], False),
        (10.0, [(0.0, 5000), (60.0, 1)], False),  # earlier bytes count
        (10.0, [(0.0, 5000), (61.0, 1)], True),
        (10.0, [(5.0, 10), (5.0, 10), (1.0, 10)], True),
        (0.0, [(1.0, 99)], True),
    ],
)
def test_body_below_the_minimum_rate_is_refused(
    grace: float, pieces: list[tuple[float, int]], slow: bool, clock: Clock
) -> None:
    deadline = Deadline(LONG, LONG, min_body_rate=100, min_body_rate_grace=grace)

    def receive() -> None:
        for seconds, size in pieces:
            deadline.expect_client()
            clock.advance(seconds)
            deadline.count_received(size)
            clock.advance(1000)  # time of the gateway or a server

    if not slow:
        receive()
        return
    with pytest.raises(
        GatewayError, match=r"too slowly.*limits\.min_body_rate: 100 bytes"
    ) as caught:
        receive()
    assert caught.value.kind is ErrorKind.CLIENT_TIMEOUT


# -------------------------------------------------------------------------------------------- parts


async def _part(deadline: Deadline, url: str, time: float) -> str:
    try:
        with deadline:
            deadline.expect_server(ServerName(url, "upstream 'u'"))
            await asyncio.sleep(time)
    except GatewayError as error:
        return error.message
    return "done"


@LIMITS
async def test_part_that_times_out_does_not_end_the_others(
    idle_timeout: float, request_timeout: float, limit: str
) -> None:
    with Deadline(idle_timeout, request_timeout) as deadline:
        with deadline.suspended_for_parts():
            ends = await asyncio.gather(
                _part(deadline.part(), URL, LONG), _part(deadline.part(), URL, 0)
            )
        assert ends[1] == "done"
        assert ends[0].startswith(f"waiting for {URL}: ")
        assert limit in ends[0]


@pytest.mark.parametrize(
    ("taken", "left"),
    [(0, LONG), (LONG / 2, LONG / 2), (LONG - 1, FOR_THE_ANSWER), (2 * LONG, FOR_THE_ANSWER)],
)
async def test_client_has_time_for_the_response_after_slow_parts(
    taken: float, left: float, clock: Clock
) -> None:
    async def run() -> None:
        with Deadline(2 * LONG, LONG) as deadline:
            deadline.expect_server(SERVER)
            with deadline.suspended_for_parts():
                clock.advance(taken)
            clock.advance(left - 0.1)
            await asyncio.sleep(0)
            made.append("answer")
            clock.advance(0.1)
            await asyncio.sleep(0)
            made.append("too much")

    made: list[str] = []
    with pytest.raises(GatewayError) as caught:
        await run()
    assert made == ["answer"]
    assert caught.value.message == f"waiting for the client: {request_timeout_text(LONG)}"


async def test_server_has_no_extra_time_after_slow_parts(clock: Clock) -> None:
    async def run() -> None:
        with Deadline(LONG, LONG) as deadline:
            with deadline.suspended_for_parts():
                clock.advance(LONG)
            with deadline.suspended_for_parts(), deadline.part():
                clock.advance(0)
                await asyncio.sleep(0)

    with pytest.raises(GatewayError, match="request_timeout"):
        await run()


async def test_part_has_the_remaining_time() -> None:
    with Deadline(LONG, LONG, LONG - SHORT) as deadline, deadline.suspended_for_parts():
        end = await _part(deadline.part(), URL, LONG)
    assert end == SPENT


async def test_call_can_be_ended_with_an_error_of_its_own() -> None:
    ending = GatewayError(ErrorKind.NOT_READY, "the gateway is stopping")

    def end(deadline: Deadline) -> None:
        deadline.expect_server(SERVER)
        deadline.end(ending)
        deadline.end(GatewayError(ErrorKind.INTERNAL, "too late"))
        assert deadline.translate(asyncio.CancelledError()) is ending

    assert await _waiting(end) is ending


async def test_call_that_is_over_is_not_ended() -> None:
    with Deadline(LONG, LONG) as deadline:
        pass
    deadline.end(GatewayError(ErrorKind.INTERNAL, "too late"))
    await asyncio.sleep(0)
