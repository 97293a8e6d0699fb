"""The gateway's own health."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.proxy import readiness as readiness_module
from gateway.proxy.destination import Upstream
from gateway.proxy.readiness import CACHE_SECONDS, Readiness, unready_endpoints
from gateway.proxy.router import Route, Router
from gateway.routing.endpoint_health import HealthCheckPolicy
from gateway.routing.matcher import Match, Pattern
from gateway.upstream.pool.checks import HealthChecker, PoolSupervisor
from tests.support.doubles.cluster import (
    A,
    B,
    C,
    D,
    connect_error,
    one_upstream,
    received_requests,
    scripted_response,
    send_request,
    servers,
    weighted_destinations,
)
from tests.support.doubles.streaming import (
    LIMITS,
    ScriptedClientResponse,
    ScriptedUpstreamResponse,
    make_destination,
    single_destination,
)
from tests.support.gateway import no_leaks, until
from tests.upstream.pools import fail_calls

READY = "/v2/health/ready"
OK = ScriptedUpstreamResponse(200)
METHODS = ["GET", "HEAD"]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    async with no_leaks():
        yield


def _error(response: ScriptedClientResponse) -> str:
    return str(json.loads(response.body)["error"])


# ---------------------------------------------------------------------------------------- responses


@pytest.mark.parametrize("method", METHODS)
async def test_gateway_is_ready_if_every_upstream_has_a_ready_endpoint(method: str) -> None:
    down, up, other, spare, unused = endpoints = servers(
        a=connect_error(A), b=OK, c=scripted_response(b'{"ready":true}'), d=connect_error(D), e=OK
    )
    not_required = make_destination(spare)
    not_required = replace(not_required, upstream=replace(not_required.upstream, required=False))
    choices = (make_destination(down, up), not_required, make_destination(unused))
    router = Router(
        [
            Route(Match(model=Pattern.of("m")), (make_destination(other),)),
            Route(Match(), choices, (1, 1, 0)),
        ]
    )
    response = await send_request(router, method, READY)
    assert (response.status, response.body) == (200, b'{"ready":true}')
    assert dict(response.headers) == JSON | {"Content-Length": "14"}
    assert received_requests(*endpoints) == [*[[f"GET {READY}"]] * 3, [], []]


async def test_upstream_that_is_not_ready_is_named() -> None:
    a, b, c, d = servers(
        a=connect_error(A), b=scripted_response(b"", 400), c=OK, d=scripted_response(b"", 503)
    )
    router = weighted_destinations(
        make_destination(a, b, name="one"),
        make_destination(c, name="two"),
        make_destination(d, name="three"),
    )
    response = await send_request(router, "GET", READY)
    assert response.status == 503
    assert _error(response) == "not ready: upstream one, upstream three"
    assert response.record.error == (
        f"not ready: upstream one (cannot connect to {A}: Connection refused; {B} returned 400), "
        "upstream three (http://d:8000 returned 503)"
    )


async def test_timeout_of_readiness_names_the_upstreams() -> None:
    cluster = one_upstream(limits=replace(LIMITS, idle_timeout=0.03), a=asyncio.Event())
    response = await cluster.ask("GET", READY)
    assert response.status == 504
    assert _error(response).startswith("waiting for the endpoints of servers: nothing moved")
    await cluster.router.readiness.close()


# ------------------------------------------------------------------------ the check of one upstream


async def test_first_ready_endpoint_ends_the_check() -> None:
    stuck = ScriptedUpstreamResponse(200, {}, [asyncio.Event()])
    cluster = one_upstream(a=asyncio.Event(), b=stuck, c=OK)
    before = asyncio.all_tasks()
    assert await unready_endpoints(cluster.destinations[0].upstream) == ()
    assert asyncio.all_tasks() == before
    assert cluster.log[-1] == "server is let go"


async def test_error_tells_the_reason_of_every_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of them counts as a call that failed."""
    monkeypatch.setattr(readiness_module, "READINESS_TIMEOUT", 0.02)
    cluster = one_upstream(a=asyncio.Event(), b=connect_error(B), c=scripted_response(b"", 204))
    upstream = cluster.destinations[0].upstream
    assert await unready_endpoints(upstream) == (
        f"{A} did not say in 0.02 s that it is ready",
        f"cannot connect to {B}: Connection refused",
        f"{C} returned 204",
    )
    assert cluster.outstanding == 0
    assert all(member.ejection.failures == 0 for member in upstream.pool.members)


async def test_endpoint_is_ready_as_far_as_a_gateway_without_descriptors_knows() -> None:
    lack = GatewayError(ErrorKind.EXHAUSTED, "the gateway is out of local resources")
    cluster = one_upstream(a=lack, b=connect_error(B))
    assert await unready_endpoints(cluster.destinations[0].upstream) == ()


# ------------------------------------------------------------------------------ one check at a time


class ScriptedChecks:
    """Checks that a test ends, and a clock that it sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.count = 0
        self.cancelled = 0
        self.outcome: tuple[str, ...] | Exception = ()
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        upstream = make_destination(*servers(a=OK), name="one").upstream
        self.readiness = Readiness([upstream], self.check, lambda: self.now)

    async def check(self, upstream: Upstream) -> tuple[str, ...]:
        assert upstream.name == "one"
        self.count += 1
        try:
            await self.may_finish.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
async def checks() -> ScriptedChecks:
    return ScriptedChecks()


async def test_outcome_is_cached(checks: ScriptedChecks) -> None:
    for _ in range(3):
        assert await checks.readiness.check() == ""
    checks.outcome = ("down",)
    checks.now += CACHE_SECONDS - 0.001
    assert await checks.readiness.check() == ""
    assert checks.count == 1
    checks.now += 0.001
    for _ in range(3):
        assert await checks.readiness.check() == "upstream one (down)"
    checks.outcome = ()
    checks.now += CACHE_SECONDS
    assert await checks.readiness.check() == ""
    assert checks.count == 3


async def test_outcome_is_cached_from_the_end_of_its_check(checks: ScriptedChecks) -> None:
    checks.may_finish.clear()
    waiting = asyncio.create_task(checks.readiness.check())
    await until(lambda: checks.count)
    checks.now += 100
    checks.may_finish.set()
    await waiting
    await checks.readiness.check()
    assert checks.count == 1


async def test_concurrent_clients_share_one_check(checks: ScriptedChecks) -> None:
    checks.may_finish.clear()
    checks.outcome = ("down",)
    tasks = [asyncio.create_task(checks.readiness.check()) for _ in range(20)]
    await until(lambda: checks.count)
    tasks[0].cancel()  # it started the check
    tasks[7].cancel()
    await until(lambda: tasks[0].done() and tasks[7].done())
    checks.may_finish.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes.count("upstream one (down)") == 18
    assert (checks.count, checks.cancelled) == (1, 0)


async def test_close_cancels_the_check(checks: ScriptedChecks) -> None:
    await checks.readiness.close()
    checks.may_finish.clear()
    task = asyncio.create_task(checks.readiness.check())
    await until(lambda: checks.count)
    await checks.readiness.close()
    assert checks.cancelled == 1
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_unexpected_error_of_a_check_is_not_cached(checks: ScriptedChecks) -> None:
    checks.outcome = ZeroDivisionError()
    with pytest.raises(ExceptionGroup):
        await checks.readiness.check()
    checks.outcome = ()
    assert await checks.readiness.check() == ""


# ------------------------------------------------------------------------------- with health checks


def _prober() -> PoolSupervisor:
    return PoolSupervisor(HealthChecker("/probe", 60, 60, HealthCheckPolicy()))


@pytest.mark.parametrize(("status", "ready"), [(200, True), (500, False)])
async def test_readiness_waits_for_the_first_health_check(status: int, ready: bool) -> None:
    go_on = asyncio.Event()
    (endpoint,) = servers(a=(go_on, ScriptedUpstreamResponse(status)))
    destination = make_destination(endpoint, supervisor=_prober())
    pool = destination.upstream.pool
    await pool.start()
    asking = asyncio.create_task(send_request(single_destination(destination), "GET", READY))
    await until(lambda: endpoint.requests)
    assert not asking.done()
    go_on.set()
    response = await asking
    assert response.status == (200 if ready else 503)
    if not ready:
        why = f"not ready: upstream servers ({A}: GET /probe returned 500)"
        assert (_error(response), response.record.error) == ("not ready: upstream servers", why)
    assert received_requests(endpoint) == [["GET /probe"]]
    await pool.close()


async def test_unreachable_upstream_overrides_a_cached_outcome() -> None:
    destination = make_destination(*servers(a=OK, b=OK), supervisor=_prober())
    pool, router = destination.upstream.pool, single_destination(destination)
    await pool.start()
    assert (await send_request(router, "GET", READY)).status == 200
    fail_calls(pool, 0, connect_error(A), times=2)
    assert (await send_request(router, "GET", READY)).status == 200
    fail_calls(pool, 1, connect_error(B))
    response = await send_request(router, "GET", READY)
    assert response.status == 503
    assert response.record.error == (
        f"not ready: upstream servers (cannot connect to {A}: Connection refused; "
        f"cannot connect to {B}: Connection refused)"
    )
    await pool.close()


async def test_readiness_waits_only_briefly_for_the_first_health_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness_module, "READINESS_TIMEOUT", 0.05)
    endpoints = servers(a=asyncio.Event(), b=scripted_response(b"", 500))
    destination = make_destination(*endpoints, supervisor=_prober())
    await destination.upstream.pool.start()
    response = await send_request(single_destination(destination), "GET", READY)
    assert response.status == 503
    assert response.record.error == (
        f"not ready: upstream servers ({A}: not probed yet; {B}: GET /probe returned 500)"
    )
    await destination.upstream.pool.close()
