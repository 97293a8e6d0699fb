"""Health checks of members, and the tasks that run the checks."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.routing.endpoint_health import HealthCheckPolicy
from gateway.upstream.pool.checks import HealthChecker, PoolSupervisor
from gateway.upstream.pool.dialect import DialectDetector
from gateway.upstream.pool.member import Member, Outcome
from gateway.upstream.pool.pool import Lease, Pool
from tests.support.doubles.iterations import iterations
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint, ScriptedUpstreamResponse
from tests.support.gateway import no_leaks, until
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
)
from tests.upstream.endpoints import EndpointAt
from tests.upstream.pools import leased, running

WELL = http_response()
ILL = http_response(status="503 Service Unavailable")
Probing = Callable[..., AbstractAsyncContextManager[Pool]]


@pytest.fixture
def probing(endpoint_at: EndpointAt) -> Probing:
    """Make pools with health checks at short intervals."""

    def probing(
        *urls: str, time: float = 5, unhealthy: int = 2
    ) -> AbstractAsyncContextManager[Pool]:
        policy = HealthCheckPolicy(1, unhealthy)
        health_checker = HealthChecker("/ready", 0.01, time, policy, random=lambda: 0.0)
        endpoints = [endpoint_at(url) for url in urls]
        return running(Pool(endpoints, supervisor=PoolSupervisor(health_checker)))

    return probing


def _eject(member: Member, pool: Pool) -> None:
    """Make calls to an endpoint fail until it is ejected."""
    for _ in range(5):
        lease = Lease(pool, member)
        lease.acquire()
        lease.release(Outcome.FAILED)


def _is_asked(server: ScriptedServer, times: int) -> bool:
    return len(server.requests) >= times


class _Moody:
    """Responds with the current status."""

    def __init__(self) -> None:
        self.http_response = WELL

    async def __call__(self, connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(self.http_response)


async def _close(connection: Connection) -> None:
    await connection.request()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (never_respond, "no response to GET /ready within 0.05 s"),
        (_close, "{url} closed the connection before it responded"),
        (
            always_respond(http_response(bytes(65_537))),
            "the response of {url} to GET /ready is larger than 65536 bytes",
        ),
        (always_respond(http_response(status="302 Found")), "GET /ready returned 302"),
    ],
)
async def test_failed_health_checks_give_their_reason(
    probing: Probing, script: Script, reason: str
) -> None:
    time = 0.05 if "within" in reason else 5
    async with ScriptedServer(script) as bad, probing(bad.url, time=time) as pool:
        await until(lambda: pool.snapshot()[0].healthy is False)
        assert pool.snapshot()[0].health_check_result.startswith(reason.format(url=bad.url))


async def test_endpoint_that_becomes_healthy_ends_its_ejection(probing: Probing) -> None:
    moody = _Moody()
    moody.http_response = ILL
    async with (
        ScriptedServer(moody) as server,
        ScriptedServer() as good,
        probing(server.url, good.url) as pool,
    ):
        await until(lambda: pool.snapshot()[0].healthy is False)
        _eject(pool.members[0], pool)
        assert pool.snapshot()[0].consecutive_ejections == 1
        moody.http_response = WELL
        await until(lambda: pool.snapshot()[0].healthy)
        assert leased(pool) == {server.url, good.url}
        # Checks that succeed again and again do not end an ejection.
        _eject(pool.members[0], pool)
        await until(partial(_is_asked, server, len(server.requests) + 3))
        assert leased(pool) == {good.url}


async def test_check_that_the_gateway_cannot_make_has_no_result() -> None:
    lack = GatewayError(ErrorKind.EXHAUSTED, "the gateway is out of local resources")
    turns = ScriptedUpstreamResponse(200), lack, lack, asyncio.Event()
    endpoint = ScriptedEndpoint(EventLog(), *turns)
    health_checker = HealthChecker("/", 0.01, 5, HealthCheckPolicy(1, 1), random=lambda: 0.0)
    async with running(Pool([endpoint], supervisor=PoolSupervisor(health_checker))) as pool:
        await until(lambda: len(endpoint.requests) == 4)
        assert pool.snapshot()[0].healthy


class _Attending(HealthChecker):
    """Records the members whose task runs, after it has failed with these errors."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__("/", 1, 1, HealthCheckPolicy())
        self.errors = list(errors)
        self.attended: list[Member] = []

    async def probe(self, member: Member) -> float:
        if self.errors:
            raise self.errors.pop()
        self.attended.append(member)
        try:
            return await asyncio.Event().wait()
        finally:
            self.attended.remove(member)


def _members(count: int) -> list[Member]:
    return [Member(ScriptedEndpoint(EventLog(), url=f"http://{number}")) for number in range(count)]


async def test_tasks_of_a_member_run_until_it_is_removed() -> None:
    health_checker = _Attending()
    supervisor = PoolSupervisor(health_checker)
    one, two, three = _members(3)
    async with no_leaks():
        supervisor.add([one, two])
        await until(lambda: health_checker.attended == [one, two])
        supervisor.remove([one])
        supervisor.add([three])
        await until(lambda: health_checker.attended == [two, three])
        await supervisor.close()
        assert not health_checker.attended


async def test_failed_task_is_logged_and_starts_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.upstream.pool.watch._RESTART_DELAY", 0.01)
    health_checker = _Attending(ZeroDivisionError())
    supervisor = PoolSupervisor(health_checker)
    members = _members(1)
    async with no_leaks():
        supervisor.add(members)
        await until(lambda: health_checker.attended == members)
        await supervisor.close()
        assert not health_checker.attended
    assert caplog.records[0].levelno == logging.ERROR
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("random", "soonest"), [(0.0, 1), (0.9, 0)])
async def test_first_pause_is_a_random_part_of_the_others(random: float, soonest: int) -> None:
    """So gateways that start together do not ask their servers at the same time forever."""

    class Counting(_Attending):
        async def probe(self, member: Member) -> float:
            self.attended.append(member)
            return 60

    health_checker = Counting()
    health_checker.random = lambda: random
    supervisor = PoolSupervisor(health_checker)
    supervisor.add(_members(1))
    await iterations(20)
    assert len(health_checker.attended) == 1 + soonest
    await supervisor.close()


async def test_health_change_rechecks_the_dialect() -> None:
    answers = (ScriptedUpstreamResponse(200, {}, [b"{}"]) for _ in range(3))
    endpoint = ScriptedEndpoint(EventLog(), *answers, asyncio.Event())
    health_checker = HealthChecker("/", 60, 5, HealthCheckPolicy(), random=lambda: 0.9)
    supervisor = PoolSupervisor(health_checker, dialect_detector=DialectDetector("u", 60, 0))
    async with no_leaks(), running(Pool([endpoint], supervisor=supervisor)):
        await until(lambda: [each.target for each in endpoint.requests].count("/v2") == 2)
