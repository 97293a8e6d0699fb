"""The mirror: what it gets, and that the client's own call does not notice it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.observe.call_record import CallRecord
from gateway.observe.call_trace import CallTrace
from gateway.protocol.operations import Operation, OperationKind
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.calls.dispatch import handle_request, proxy_call
from gateway.proxy.calls.planner import Planner
from gateway.proxy.destination import Limits
from gateway.proxy.filters.mirror import Mirror, MirroredRequest
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from tests.proxy.calls.scene import plan_of, start
from tests.support.doubles.cluster import send_request
from tests.support.doubles.fast_path import ReadyEndpoint, ScriptedClient
from tests.support.doubles.streaming import (
    LIMITS,
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
)
from tests.support.gateway import until
from tests.support.inference_messages import FLOATS, HEADER_LENGTH, INFER, json_request, metadata

GENERATE = "/v2/models/m/generate"
OK = ScriptedUpstreamResponse(200, {}, [b'{"outputs":[]}'])
METADATA = ScriptedUpstreamResponse(200, {}, [metadata(-1)])
NO_CONFIG = ScriptedUpstreamResponse(404)
CHUNKED = {"Transfer-Encoding": "chunked"}
URL = "http://shadow:8000"

ServerStep = ScriptedUpstreamResponse | BaseException | asyncio.Event


class Scene:
    """A client, a server and a mirror; each server writes its own log."""

    def __init__(
        self,
        server: Sequence[ServerStep] = (OK,),
        shadow: Sequence[ServerStep] = (OK,),
        limits: Limits = LIMITS,
        budget: MemoryBudget | None = None,
        most: int = 64,
    ) -> None:
        self.log, self.shadow_log = EventLog(), EventLog()
        self.server = ScriptedEndpoint(self.log, *server)
        self.shadow = ScriptedEndpoint(self.shadow_log, *shadow, url=URL)
        self.budget = budget or MemoryBudget(10**9)
        shadowed = make_destination(self.shadow, limits=limits, name="shadow")
        shadowed = replace(shadowed, memory_budget=self.budget)
        self.mirror = Mirror(shadowed, 1.0, proxy_call, lambda: 0.0, most)
        to = (make_destination(self.server, limits=limits),)
        self.router = Router([Route(Match(), to, mirror=self.mirror)])

    async def ask(
        self, target: str, *body: BodyStep, method: str = "POST", **more: Any
    ) -> ScriptedClientResponse:
        return await send_request(self.router, method, target, *body, log=self.log, **more)

    async def over(self) -> None:
        """Wait until no mirrored request is in flight."""
        await until(lambda: not self.mirror.in_flight)
        assert self.budget.total == 0
        assert self.mirror.destination.upstream.pool.outstanding == [0]


def _drawn(*numbers: float) -> Callable[[], float]:
    return iter(numbers).__next__


# ----------------------------------------------------------------------------------------- requests

LARGE = replace(LIMITS, max_buffered_body_bytes=10**6)


async def test_raw_binary_header_comes_from_the_metadata_of_each_server() -> None:
    steps = METADATA, NO_CONFIG, OK
    scene = Scene(steps, (ScriptedUpstreamResponse(200, {}, [metadata(1, 3)]), NO_CONFIG, OK))
    await scene.ask(INFER, FLOATS.tobytes(), headers={HEADER_LENGTH: "0"})
    await scene.over()
    assert b'"shape":[3]' in scene.server.bodies[-1].replace(b" ", b"")
    assert b'"shape":[1,3]' in scene.shadow.bodies[-1].replace(b" ", b"")
    assert scene.shadow.bodies[-1].endswith(FLOATS.tobytes())


async def test_mirrored_request_is_sent_once() -> None:
    """The read buffer is reused: the copy must not change with it."""
    memory = bytearray(b"before")

    class Reused(ScriptedRequest):
        async def read(self) -> Any:
            return memoryview(memory) if await super().read() else b""

    free = asyncio.Event()
    scene = Scene()
    request = Reused(scene.log, "POST", GENERATE, CHUNKED, [b"x", free])
    asking = asyncio.create_task(
        handle_request(request, ScriptedClientResponse(scene.log), Planner(scene.router))
    )
    await until(lambda: scene.budget.total == len(memory))
    memory[:] = b"after!"
    free.set()
    await asking
    await scene.over()
    assert scene.shadow.bodies == [b"before"]


@pytest.mark.parametrize(("method", "target"), [("GET", INFER), ("POST", "/v2/models/m/other")])
async def test_other_operations_are_not_mirrored(method: str, target: str) -> None:
    scene = Scene()
    await scene.ask(target, b"{}", method=method)
    assert scene.server.requests
    assert not scene.mirror.in_flight
    planner = Planner(scene.router)
    plan = plan_of(planner, method, target, {"Content-Length": "2"})
    assert plan is None or plan.mirror is None


@pytest.mark.parametrize("is_traced", [False, True])
def test_copy_keeps_the_record_of_a_traced_call_only(is_traced: bool) -> None:
    """The record may hold the captured messages of a call that has ended long ago."""
    record = CallRecord("POST", GENERATE)
    if is_traced:
        record.trace = CallTrace(lambda _: None)
    operation = Operation(OperationKind.GENERATE, "m")
    headers = CIMultiDictProxy[str](CIMultiDict())
    copy = MirroredRequest(Scene().mirror, "POST", GENERATE, headers, 2, operation, record)
    assert copy.client_record is (record if is_traced else None)


# --------------------------------------------------------------------------------------- the client


def _hang() -> asyncio.Event:
    """Return an event that is never set."""
    return asyncio.Event()


async def test_mirrored_body_of_many_pieces_yields_to_other_calls() -> None:
    async def log_turns() -> None:
        while True:
            scene.shadow_log.append("others")
            await asyncio.sleep(0)

    scene = Scene(limits=LARGE)
    task = asyncio.create_task(log_turns())
    await scene.ask(GENERATE, *[bytes(70_000)] * 8)
    await scene.over()
    task.cancel()
    log = scene.shadow_log
    sent = [number for number, line in enumerate(log) if line == "server gets 70000"]
    assert len(sent) >= 7
    assert all("others" in log[one:two] for one, two in pairwise(sent))


# ---------------------------------------------------------------------------------------- the share


async def test_fast_path_samples_each_request() -> None:
    shadow = ScriptedEndpoint(EventLog(), *[OK] * 3)
    destination = make_destination(shadow)
    mirror = Mirror(destination, 0.3, proxy_call)
    ready = ReadyEndpoint()
    route = Route(Match(), (make_destination(ready),), mirror=mirror)
    planner = Planner(Router([route], _drawn(0.29, 0.3, 0.9, 0.0, 0.1)))
    body = json_request()
    copied = []
    for _ in range(4):
        before = len(shadow.requests)
        assert start(planner, "POST", INFER, {"X-A": "1"}, body, ScriptedClient()) is not None
        await until(lambda: not mirror.in_flight)
        copied.append(len(shadow.requests) - before)
    assert copied == [1, 0, 0, 1]
    # A call that leaves the fast path is sampled on the streaming path.
    ready.ready = False
    assert start(planner, "POST", INFER, {"X-A": "1"}, body, ScriptedClient()) is None
    assert not mirror.in_flight


# ------------------------------------------------------------------------------------ the fast path


async def test_mirrored_request_cancelled_before_its_start_releases_its_memory() -> None:
    shadow = ScriptedEndpoint(EventLog(), OK)
    mirror = Mirror(make_destination(shadow), 1.0, proxy_call)
    route = Route(Match(), (make_destination(ReadyEndpoint()),), mirror=mirror)
    planner = Planner(Router([route]))
    assert start(planner, "POST", GENERATE, {}, b"{}", ScriptedClient()) is not None
    assert mirror.destination.memory_budget.total == 2
    await mirror.close()
    assert (mirror.in_flight, mirror.destination.memory_budget.total) == (0, 0)
    assert shadow.requests == []
    planner.close()


# --------------------------------------------------------------------------------------------- caps


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Returns the warnings so far; there must be no errors."""
    caplog.set_level(logging.WARNING)
    yield lambda: [each.message for each in caplog.records if each.name == "tensorgate.mirror"]
    assert [each for each in caplog.records if each.levelno > logging.WARNING] == []


START = "mirror to 'shadow': "


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_over_the_cap_is_not_mirrored(
    chunked: bool, told: Callable[[], list[str]]
) -> None:
    scene = Scene([OK, OK], limits=replace(LIMITS, max_buffered_body_bytes=1000))
    headers = CHUNKED if chunked else {}
    for pieces in ([b"x" * 500] * 2, [b"x" * 500, b"x" * 501]):
        response = await scene.ask(GENERATE, *pieces, headers=headers)
        assert response.status == 200
    await scene.over()
    assert scene.shadow.bodies == [b"x" * 1000]
    assert scene.server.bodies == [b"x" * 1000, b"x" * 1001]
    why = "its body is larger than 1000 bytes (limits.max_buffered_body_bytes)"
    assert told() == [f"{START}0 of 1 requests failed, 1 were not sent, last: {why}"]


async def test_content_length_over_the_cap_reserves_no_memory() -> None:
    scene = Scene(limits=replace(LIMITS, max_buffered_body_bytes=1000))
    more = asyncio.Event()
    body: list[BodyStep] = [b"x", more, b"x" * 1000]
    asking = asyncio.create_task(scene.ask(GENERATE, *body, headers={"Content-Length": "1001"}))
    await until(lambda: scene.log.count_of("client sends"))
    assert scene.budget.total == 0
    more.set()
    assert (await asking).status == 200
    await scene.over()
    assert scene.shadow.requests == []


async def test_memory_of_all_mirrored_requests_is_bounded(told: Callable[[], list[str]]) -> None:
    budget = MemoryBudget(2500)
    hang = asyncio.Event()
    scene = Scene([OK] * 4, [hang, OK], budget=budget)
    pieces: list[BodyStep] = [b"x" * 1000, asyncio.Event()]
    waiting = asyncio.create_task(scene.ask(GENERATE, *pieces, headers={"Content-Length": "2000"}))
    await until(lambda: budget.total == 1000)
    assert (await scene.ask(GENERATE, b"y" * 1000)).status == 200
    await until(lambda: scene.shadow.requests)
    assert budget.total == 2000  # the mirror has not responded yet
    assert (await scene.ask(GENERATE, b"z" * 300, b"z" * 300)).status == 200
    assert budget.total == 2000
    (message,) = told()
    assert message.startswith(f"{START}0 of 0 requests failed, 1 were not sent, last: the gateway")
    assert message.endswith("at most 2500 bytes may be buffered (limits.max_buffered_bytes)")
    waiting.cancel()
    hang.set()
    await scene.over()


async def test_slot_taken_meanwhile_skips_the_mirrored_request() -> None:
    """There was room when the body started, and there is none when it is complete."""
    hang, more = asyncio.Event(), asyncio.Event()
    scene = Scene([OK] * 2, [hang, OK], most=1)
    slow = asyncio.create_task(
        scene.ask(GENERATE, b"x" * 10, more, b"x" * 10, headers={"Content-Length": "20"})
    )
    await until(lambda: scene.budget.total == 10)
    await scene.ask(GENERATE, b"quick")
    more.set()
    assert (await slow).status == 200
    assert scene.mirror.in_flight == 1
    hang.set()
    await scene.over()
    assert scene.shadow.bodies == [b"quick"]


# --------------------------------------------------------------------------------- skipped requests


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, [b"no JSON"]),
        ({"Content-Length": "100"}, [b'{"inputs":', GatewayError(ErrorKind.BAD_REQUEST, "broken")]),
        ({"Content-Length": "2000000"}, [b"x"]),
    ],
)
async def test_request_error_is_no_failure_of_the_mirror(
    headers: dict[str, str], body: list[BodyStep], told: Callable[[], list[str]]
) -> None:
    scene = Scene(limits=replace(LIMITS, max_request_bytes=10_000))
    assert (await scene.ask(INFER, *body, headers=headers)).status in (400, 413)
    await scene.over()
    await scene.mirror.close()
    assert scene.server.requests == scene.shadow.requests == []
    assert told() == []


# ----------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (GatewayError(ErrorKind.UNREACHABLE, "cannot connect"), "cannot connect"),
        (
            ScriptedUpstreamResponse(502, {}, [b"x" * 150] * 3),
            f"the response was 502: '{'x' * 200}'",
        ),
        (
            ScriptedUpstreamResponse(200, {}, [b"{begun", bad_response("cut short")]),
            f"{URL}: cut short",
        ),
        (asyncio.Event(), f"waiting for {URL}: nothing moved for 0.1 s (limits.idle_timeout)"),
    ],
)
async def test_log_tells_why_a_mirrored_request_failed(
    step: ServerStep, why: str, told: Callable[[], list[str]]
) -> None:
    hangs = isinstance(step, asyncio.Event)
    scene = Scene(shadow=[step], limits=replace(LIMITS, idle_timeout=0.1) if hangs else LIMITS)
    assert (await scene.ask(INFER, json_request())).status == 200
    await scene.over()
    assert told() == [f"{START}1 of 1 requests failed, last: {why}"]


@pytest.mark.parametrize(
    ("server", "body", "headers"),
    [([OK], json_request(), {}), ([METADATA, NO_CONFIG, OK], bytes(4), {HEADER_LENGTH: "0"})],
    ids=["of the request", "of the metadata for it"],
)
async def test_unknown_model_of_the_mirror_counts_as_rejected(
    server: list[ServerStep], body: bytes, headers: dict[str, str], told: Callable[[], list[str]]
) -> None:
    scene = Scene(server, [ScriptedUpstreamResponse(404, {}, [b"unknown model"])])
    await scene.ask(INFER, body, headers=headers)
    await scene.over()
    why = "the response was 404: 'unknown model'"
    rejected = "0 of 1 requests failed, 1 were rejected with 4xx"
    assert told() == [f"{START}{rejected}, last: {why}"]


async def test_unexpected_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(shadow=[RuntimeError("what is wrong")])
    assert (await scene.ask(INFER, json_request())).status == 200
    await scene.over()
    (error,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert error.message == f"mirroring POST {INFER} failed"
    assert error.exc_info is not None
    assert "what is wrong" in str(error.exc_info[1])


# -------------------------------------------------------------------------------------------- close


async def test_close_cancels_requests_in_flight_and_refuses_more(
    told: Callable[[], list[str]],
) -> None:
    down = GatewayError(ErrorKind.UNREACHABLE, "down")
    scene = Scene([OK] * 5, [down, down, _hang(), _hang()])
    for _ in range(4):
        await scene.ask(GENERATE, b"x")
    await until(lambda: len(scene.shadow.requests) == 4)
    await scene.mirror.close()
    assert (scene.mirror.in_flight, scene.budget.total) == (0, 0)
    await scene.ask(GENERATE, b"x")
    await scene.over()
    assert len(scene.shadow.requests) == 4
    # Pending counts are logged now; cancelled requests have not failed.
    assert told() == [f"{START}1 of 1 requests failed, last: down"] * 2
