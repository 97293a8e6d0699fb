"""Calls of the fast path that fail, continue in a task, or give back what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.proxy.calls.buffered import BufferedCall
from gateway.routing.retry import RetryPolicy
from tests.proxy.calls.scene import Scene
from tests.support.doubles.fast_path import ReadyEndpoint, response_head
from tests.support.doubles.streaming import (
    LIMITS,
    BodyStep,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
)
from tests.support.inference_messages import HEADER_LENGTH

# -------------------------------------------------------------------------------------- no response


async def test_unexpected_error_of_the_upstream_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.get()
    scene.receiver.on_error(ZeroDivisionError())
    assert (scene.responses.status, scene.responses.last) == (500, True)
    assert scene.error == "the gateway failed; its log says why"
    assert "GET /v2/x failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_ended_call_does_not_time_out() -> None:
    scene = Scene()
    scene.get()
    scene.receiver.on_complete(response_head(), b"")
    scene.get()
    scene.receiver.on_error(bad_response("it fell over"))
    scene.get().cancel()
    scene.get()
    scene.receiver.on_headers(ScriptedUpstreamResponse())  # its task has its own deadline
    scene.clock.advance(1000)
    assert [told.status for told in scene.client.responses] == [200, 502]
    assert scene.outstanding == 1


async def test_closed_fast_path_times_out_nothing() -> None:
    scene = Scene()
    scene.get()
    scene.planner.close()
    scene.clock.advance(1000)
    assert scene.client.responses == []
    assert scene.clock.pending == []


# -------------------------------------------------------------------------------- partial responses


@pytest.mark.parametrize("cause", ["the head", "a retried status", "an error"])
async def test_time_before_a_task_counts_towards_the_request_timeout(cause: str) -> None:
    retry = RetryPolicy(no_response=True, statuses=frozenset((503,)))
    scene = Scene(replace(LIMITS, request_timeout=20), retry=retry)
    stalls = ScriptedUpstreamResponse(200, {}, [asyncio.Event()])
    members = [scene.endpoint, ScriptedEndpoint(scene.log, stalls)]
    scene.destination.upstream.pool.set_endpoints(members)
    scene.get()
    scene.clock.advance(19.9)
    if cause == "the head":
        scene.receiver.on_headers(stalls)
    elif cause == "an error":
        scene.receiver.on_error(GatewayError(ErrorKind.NO_RESPONSE, "it closed"))
    else:
        scene.receiver.on_complete(response_head(503), b"")
    response = ScriptedClientResponse(scene.log)
    await asyncio.wait_for(scene.client.begin_task(response), 5)
    late = "waiting for http://server:8000: not done in 20 s (limits.request_timeout)"
    assert (response.status, response.record.error) == (200, late)
    assert scene.log[-1] == "client is cut off"


# ----------------------------------------------------------------------------------------- releases

End = Callable[[Scene, BufferedCall], Awaitable[None]]


async def _complete(scene: Scene, _: BufferedCall) -> None:
    scene.receiver.on_complete(response_head(), b"")


async def _broken(scene: Scene, _: BufferedCall) -> None:
    scene.receiver.on_complete(response_head(headers={HEADER_LENGTH: "x"}), b"")


async def _failed(scene: Scene, _: BufferedCall) -> None:
    scene.receiver.on_error(bad_response("it fell over"))


async def _timed_out(scene: Scene, _: BufferedCall) -> None:
    scene.clock.advance(1000)


async def _cancelled(_: Scene, call: BufferedCall) -> None:
    call.cancel()


def _begin_task(scene: Scene, *steps: bytes | BaseException | asyncio.Event) -> asyncio.Task[None]:
    scene.receiver.on_headers(ScriptedUpstreamResponse(200, {}, steps).with_log(scene.log))
    return scene.client.begin_task(ScriptedClientResponse(scene.log))


async def _streamed(scene: Scene, _: BufferedCall) -> None:
    await _begin_task(scene, b"{one", b"two")


async def _fault(scene: Scene, _: BufferedCall) -> None:
    with pytest.raises(ZeroDivisionError):
        await _begin_task(scene, ZeroDivisionError())


async def _disconnected(scene: Scene, _: BufferedCall) -> None:
    task = _begin_task(scene, b"{one", asyncio.Event())
    for _turn in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _disconnected_before_start(scene: Scene, _: BufferedCall) -> None:
    task = _begin_task(scene, b"{one")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scene.log.count_of("server sends") == 0


ENDS: dict[str, End] = {
    "whole": _complete,
    "broken": _broken,
    "failed": _failed,
    "late": _timed_out,
    "cancelled": _cancelled,
    "begun and relayed": _streamed,
    "begun and a fault of our own": _fault,
    "begun and left": _disconnected,
    "begun and left before the task ran": _disconnected_before_start,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_resources_are_released_once(end: End) -> None:
    scene = Scene()
    call = scene.infer()
    other = scene.start("GET", "/v2/other", b"")
    assert other is not None
    scene.endpoint.asked.pop()
    assert scene.outstanding == 2
    await end(scene, call)
    await asyncio.sleep(0)  # lets done callbacks of the task run
    left = 0 if end is _timed_out else 1
    assert scene.outstanding == left
    assert "server is let go" in scene.log
    told = len(scene.client.responses)
    # The client may disconnect at any time.
    call.cancel()
    assert scene.outstanding == left
    assert len(scene.client.responses) == told
    other.cancel()
    assert scene.outstanding == 0


# ---------------------------------------------------------------------------- errors of the gateway


def _respond(scene: Scene) -> None:
    scene.receiver.on_complete(response_head(), b"")


def _fail(scene: Scene) -> None:
    scene.receiver.on_error(bad_response("it fell over"))


def _time_out(scene: Scene) -> None:
    scene.clock.advance(1000)


def _stream(scene: Scene) -> None:
    scene.receiver.on_headers(ScriptedUpstreamResponse())


@pytest.mark.parametrize("end", [_respond, _fail, _time_out, _stream])
async def test_client_that_cannot_be_told_is_dropped_and_nothing_is_kept(
    end: Callable[[Scene], None], caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene()
    scene.client.fault = ZeroDivisionError("the client fails")
    scene.start("POST", "/v2/x", b"body")
    end(scene)
    assert scene.log[-1] == "client is cut off"
    assert scene.outstanding == 0
    assert scene.destination.memory_budget.total == 0
    assert scene.planner.in_flight == 0
    assert "the client fails" in caplog.text


# ------------------------------------------------------------------------------------- the endpoint


LEFT = "left before its task ran"
BAD: dict[str, tuple[int, BodyStep]] = {
    "broken off": (200, bad_response("it fell over")),
    "stalled": (200, asyncio.Event()),
    "unavailable": (503, b"no"),
    LEFT: (503, b"no"),
}


@pytest.mark.parametrize("how", BAD)
async def test_endpoint_that_begins_a_bad_response_has_failed(how: str) -> None:
    scene = Scene(replace(LIMITS, idle_timeout=0.1))
    other = ReadyEndpoint(url="http://other")
    scene.destination.upstream.pool.set_endpoints([scene.endpoint, other])
    scene.get()
    status, step = BAD[how]
    scene.receiver.on_headers(ScriptedUpstreamResponse(status, {}, [b"begun", step]))
    task = scene.client.begin_task(ScriptedClientResponse(scene.log))
    if how == LEFT:
        task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    members = scene.destination.upstream.pool.members
    assert [member.ejection.failures for member in members] == [1, 0]


async def test_connection_is_released_before_the_response_is_sent() -> None:
    """The client's next request may need the connection to the server."""
    scene = Scene()
    scene.get()
    scene.receiver.on_complete(response_head(), b"")
    scene.get()
    scene.receiver.on_error(bad_response("it fell over"))
    assert scene.log == [
        "server is asked GET /v2/x",
        "server is let go",
        "client gets 200",
        "server is asked GET /v2/x",
        "server is let go",
        "client gets 502",
    ]
