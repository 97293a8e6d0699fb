import asyncio
from collections.abc import Callable

import pytest

from gateway.errors import ErrorKind, GatewayError, ServerName
from gateway.proxy.admission import deadline as deadline_module
from gateway.proxy.admission.deadline import Deadline, request_timeout_text
from tests.support.doubles.clock import Clock

SHORT = 0.02
LONG = 60.0
FOR_THE_ANSWER = 5.0
URL = "http://server:8000"
SERVER = ServerName(URL, "upstream 'servers'")


async def test_call_that_ends_in_time_passes() -> None:
    with Deadline(LONG, LONG) as deadline:
        deadline.expect_client()
        deadline.expect_server(SERVER)
        await asyncio.sleep(0)
    assert deadline is not None


@pytest.mark.parametrize(
    ("idle_timeout", "request_timeout", "limit"),
    [(SHORT, LONG, "limits.idle_timeout"), (LONG, SHORT, "limits.request_timeout")],
)
async def test_client_is_expected_first(
    idle_timeout: float, request_timeout: float, limit: str
) -> None:
    with pytest.raises(GatewayError) as caught, Deadline(idle_timeout, request_timeout):
        await asyncio.sleep(LONG)
    assert caught.value.kind is ErrorKind.CLIENT_TIMEOUT
    assert caught.value.message.startswith("waiting for the client: ")
    assert f"{SHORT:g} s ({limit})" in caught.value.message


async def _waiting(
    note: Callable[[Deadline], None], idle_timeout: float = SHORT, request_timeout: float = LONG
) -> GatewayError:
    """Set an expectation and wait; return the error that ends the wait."""

    async def run() -> None:
        with Deadline(idle_timeout, request_timeout) as deadline:
            note(deadline)
            await asyncio.sleep(LONG)

    with pytest.raises(GatewayError) as caught:
        await run()
    return caught.value


@pytest.mark.parametrize(("idle_timeout", "request_timeout"), [(SHORT, LONG), (LONG, SHORT)])
async def test_timeout_names_the_expected_server(
    idle_timeout: float, request_timeout: float
) -> None:
    error = await _waiting(
        lambda deadline: deadline.expect_server(SERVER), idle_timeout, request_timeout
    )
    assert error.kind is ErrorKind.SERVER_TIMEOUT
    assert error.message.startswith(f"waiting for {URL}: ")


async def test_client_can_be_expected_again() -> None:
    def expect_both(deadline: Deadline) -> None:
        deadline.expect_server(SERVER)
        deadline.expect_client()

    error = await _waiting(expect_both)
    assert error.kind is ErrorKind.CLIENT_TIMEOUT


async def test_idle_timeout_starts_anew_with_each_expectation() -> None:
    with Deadline(0.6, LONG) as deadline:
        for _ in range(5):
            await asyncio.sleep(0.15)
            deadline.expect_client()
    assert deadline.timeout_error("x").kind is ErrorKind.CLIENT_TIMEOUT


async def test_another_task_may_set_the_expectation() -> None:
    def later(deadline: Deadline) -> None:
        asyncio.get_running_loop().call_soon(deadline.expect_server, SERVER)

    assert (await _waiting(later)).kind is ErrorKind.SERVER_TIMEOUT


async def test_expectation_after_the_timeout_changes_nothing() -> None:
    async def run() -> None:
        with Deadline(SHORT, LONG) as deadline:
            try:
                await asyncio.sleep(LONG)
            finally:
                deadline.expect_client()

    with pytest.raises(GatewayError, match=r"idle_timeout"):
        await run()


async def test_cancellation_is_not_a_timeout() -> None:
    async def run() -> None:
        with Deadline(LONG, LONG):
            await asyncio.sleep(LONG)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_timeout_error_from_inside_passes() -> None:
    with pytest.raises(TimeoutError), Deadline(LONG, LONG):
        raise TimeoutError


async def test_other_error_from_inside_passes() -> None:
    with pytest.raises(KeyError), Deadline(LONG, LONG):
        raise KeyError


@pytest.mark.parametrize("spent", [LONG - SHORT, LONG, LONG + 1])
async def test_spent_time_counts_towards_the_request_timeout(spent: float) -> None:
    async def run() -> None:
        with Deadline(LONG, LONG, spent) as deadline:
            deadline.expect_server(SERVER)
            await asyncio.sleep(LONG)

    with pytest.raises(GatewayError) as caught:
        async with asyncio.timeout(5):
            await run()
    assert caught.value.kind is ErrorKind.SERVER_TIMEOUT
    assert (
        caught.value.message
        == f"waiting for {URL}: not done in {LONG:g} s (limits.request_timeout)"
    )


async def test_spent_time_does_not_count_towards_the_idle_timeout() -> None:
    with Deadline(10.0, LONG, 20.0) as deadline:
        await asyncio.sleep(0.01)
    assert deadline.timeout_error("x").kind is ErrorKind.CLIENT_TIMEOUT


@pytest.mark.parametrize(
    ("grace", "pieces", "slow"),
    [
        (10.0, [(10.0, 0)], False),
        (10.0, [(11.0, 100)], False),
        (10.0, [(11.0, 99)], True),
        (10.0, [(0.0, 5000), (60.0, 1)], False),  # earlier bytes count
        (10.0, [(0.0, 5000), (61.0, 1)], True),
        (10.0, [(5.0, 10), (5.0, 10), (1.0, 10)], True),
        (10.0, [(1.0, 100)] * 100, False),
        (0.0, [(1.0, 100)] * 100, False),
        (0.0, [(1.0, 99)], True),
        (60.0, [(60.0, 0)], False),
        (60.0, [(61.0, 99)], True),
    ],
)
def test_body_below_the_minimum_rate_is_refused(
    grace: float, pieces: list[tuple[float, int]], slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
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


def test_body_without_a_minimum_rate_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    deadline = Deadline(LONG, LONG)
    deadline.expect_client()
    clock.advance(100_000)
    deadline.count_received(0)


# -------------------------------------------------------------------------------------------- parts


async def _part(deadline: Deadline, url: str, time: float) -> str:
    try:
        with deadline:
            deadline.expect_server(ServerName(url, "upstream 'u'"))
            await asyncio.sleep(time)
    except GatewayError as error:
        return error.message
    return "done"


@pytest.mark.parametrize(
    ("idle_timeout", "request_timeout", "limit"),
    [(SHORT, LONG, "limits.idle_timeout"), (LONG, SHORT, "limits.request_timeout")],
)
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


async def test_time_of_the_parts_counts_towards_the_request_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(idle_timeout: float, request_timeout: float) -> None:
        with Deadline(idle_timeout, request_timeout) as deadline:
            deadline.expect_server(SERVER)
            with deadline.suspended_for_parts():
                await asyncio.sleep(2 * SHORT)
            await asyncio.sleep(LONG)

    monkeypatch.setattr(deadline_module, "_TIME_FOR_RESPONSE", SHORT)
    for times, limit in [((LONG, SHORT), "request_timeout"), ((SHORT, LONG), "idle_timeout")]:
        with pytest.raises(GatewayError, match=f"waiting for the client: .*{limit}"):
            await run(*times)


@pytest.mark.parametrize(
    ("taken", "left"),
    [(0, LONG), (LONG / 2, LONG / 2), (LONG - 1, FOR_THE_ANSWER), (2 * LONG, FOR_THE_ANSWER)],
)
async def test_client_has_time_for_the_response_after_slow_parts(
    taken: float, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)

    async def run() -> None:
        with Deadline(2 * LONG, LONG) as deadline:
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


async def test_server_has_no_extra_time_after_slow_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)

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
    assert end == f"waiting for {URL}: not done in {LONG:g} s (limits.request_timeout)"


async def test_part_may_have_a_share_of_the_remaining_time() -> None:
    with Deadline(LONG, LONG) as deadline, deadline.suspended_for_parts():
        end = await _part(deadline.part(SHORT / LONG), URL, LONG)
        after = await _part(deadline.part(), URL, 0)
    assert end == f"waiting for {URL}: not done in {LONG:g} s (limits.request_timeout)"
    assert after == "done"


async def test_cancellation_during_the_parts_is_not_a_timeout() -> None:
    async def run() -> None:
        with Deadline(LONG, LONG) as deadline, deadline.suspended_for_parts():
            await asyncio.sleep(LONG)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


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
