"""Checks of members: their health, which models they have ready, and the tasks that run these."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.routing.endpoint_health import HealthCheckPolicy
from gateway.upstream.pool.checks import (
    HealthChecker,
    ModelDiscovery,
    PoolSupervisor,
    fetch_ready_models,
    may_have_model,
    parse_ready_models,
)
from gateway.upstream.pool.dialect import DialectDetector
from gateway.upstream.pool.member import ANY_MODEL, Member, Outcome, ReadyModels
from gateway.upstream.pool.pool import Lease, Pool
from tests.support.doubles.iterations import iterations
from tests.support.doubles.streaming import (
    EventLog,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
    ready,
)
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
from tests.upstream.pools import Responding, leased, running

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


async def _close(connection: Connection) -> None:
    await connection.request()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (never_respond, "{url} did not respond to GET /ready within 0.05 s"),
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
    moody = Responding(ILL)
    async with (
        ScriptedServer(moody) as server,
        ScriptedServer() as good,
        probing(server.url, good.url) as pool,
    ):
        await until(lambda: pool.snapshot()[0].healthy is False)
        _eject(pool.members[0], pool)
        assert pool.snapshot()[0].consecutive_ejections == 1
        moody.data = WELL
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


Discovering = Callable[..., AbstractAsyncContextManager[Pool]]


def _index(*names: str, **others: str) -> bytes:
    entries = [{"name": name, "version": "1", "state": "READY"} for name in names]
    entries += [{"name": name, "state": state} for name, state in others.items()]
    return http_response(json.dumps(entries).encode())


@pytest.fixture
def discovering(endpoint_at: EndpointAt) -> Discovering:
    """Make pools with model discovery."""

    def discovering(*urls: str, interval: float = 0.01) -> AbstractAsyncContextManager[Pool]:
        supervisor = PoolSupervisor(model_discovery=ModelDiscovery(interval, random=lambda: 0.9))
        return running(Pool([endpoint_at(url) for url in urls], supervisor=supervisor))

    return discovering


def _models(pool: Pool) -> list[tuple[str, ...] | None]:
    return [state.models for state in pool.snapshot()]


async def test_server_is_asked_whether_it_has_a_model(
    endpoint_at: EndpointAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.upstream.pool.checks._LIST_TIMEOUT", 0.05)
    plain = always_respond(http_response(b"none", status="404 Not Found"))
    for serve, b in ((Responding(_index("a")), False), (plain, True), (never_respond, True)):
        async with ScriptedServer(serve) as server:
            endpoint = endpoint_at(server.url)
            assert [await may_have_model(endpoint, model) for model in "ab"] == [True, b]
            await endpoint.close()


async def test_refresh_during_a_request_asks_again(discovering: Discovering) -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await go_on.wait()
        await connection.send(_index("old"))
        await connection.request()
        await connection.send(_index("new"))
        await connection.wait_for_close()

    async with ScriptedServer(script) as server, discovering(server.url, interval=60) as pool:
        await until(lambda: server.requests)
        for _ in range(5):
            pool.refresh_models()
        go_on.set()
        await until(lambda: _models(pool) == [("new",)])
        assert len(server.requests) == 2


@pytest.mark.parametrize("status", ["404 Not Found", "501 Not Implemented"])
async def test_server_without_index_may_have_any_model(
    discovering: Discovering, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ScriptedServer(Responding(_index("a"))) as one,
        ScriptedServer(always_respond(http_response(status=status))) as two,
        discovering(one.url, two.url) as pool,
    ):
        await until(lambda: len(two.requests) > 6 and _models(pool)[0])
        assert leased(pool, "a") == leased(pool, "b") | {one.url} == {one.url, two.url}
        assert _models(pool)[1] is None
    message = (
        f"{two.url} serves no repository index, nor a list as KServe's: any model may be there"
    )
    assert [record.getMessage() for record in caplog.records] == [message]


async def test_known_models_stay_after_an_error(
    discovering: Discovering, caplog: pytest.LogCaptureFixture
) -> None:
    one = Responding(_index("a"))
    async with (
        ScriptedServer(Responding(_index("b"))) as other,
        ScriptedServer(one) as server,
        discovering(server.url, other.url) as pool,
    ):
        await until(lambda: _models(pool) == [("a",), ("b",)])
        for index in (
            http_response(status="503 Busy"),
            http_response(b'{"no": "index"}'),
            http_response(b"no JSON"),
            http_response(bytes(4 * 1024 * 1024 + 1)),
            b"what?\r\n\r\n",
        ):
            one.data = index
            most = len(server.requests) + 3
            await until(partial(_is_asked, server, most))
        assert leased(pool, "a") == {server.url}
        asked = server.requests[0]
        assert asked.head.first == "POST /v2/repository/index HTTP/1.1"
        assert json.loads(asked.body) == {"ready": True}
        assert asked.head.get("Content-Type") == "application/json"
    said = [record.getMessage() for record in caplog.records]
    start = f"{server.url} does not say which models it has: {server.url}"
    assert said[:2] == [
        f"{start}/v2/repository/index returned 503",
        f"{start}/v2/repository/index is no index of models",
    ]
    assert "is larger than 4194304 bytes" in said[2]
    assert said[3].startswith(f"{start} sent an invalid HTTP response")


class _V1:
    """A server without repository index, with this response at the path of the V1 list."""

    def __init__(self, listed: bytes) -> None:
        self.listed = listed

    async def __call__(self, connection: Connection) -> None:
        while True:
            asked = await connection.request()
            is_v1 = asked.head.first == "GET /v1/models HTTP/1.1"
            await connection.send(self.listed if is_v1 else http_response(status="404 Not Found"))


async def test_v1_list_is_read_from_a_server_without_index(
    discovering: Discovering, caplog: pytest.LogCaptureFixture
) -> None:
    kserve = _V1(http_response(b'{"models":["b","c"]}'))
    async with (
        ScriptedServer(Responding(_index("a", "b"))) as one,
        ScriptedServer(kserve) as two,
        discovering(one.url, two.url) as pool,
    ):
        await until(lambda: _models(pool) == [("a", "b"), ("b", "c")])
        assert leased(pool, "a") == {one.url}
        assert leased(pool, "c") == {two.url}
        kserve.listed = http_response(b'{"models":["d"]}')
        await until(lambda: _models(pool)[1] == ("d",))
        # After an error, the known models stay.
        kserve.listed = http_response(status="503 Busy")
        await until(partial(_is_asked, two, len(two.requests) + 4))
        assert leased(pool, "d") == {two.url}
    fault = f"{two.url} does not say which models it has: {two.url}/v1/models returned 503"
    assert [record.getMessage() for record in caplog.records] == [fault]


@pytest.mark.parametrize(
    "data",
    [
        http_response(b'{"object":"list","data":[{"id":"m","object":"model"}]}'),
        http_response(status="403 Forbidden"),
    ],
    ids=lambda data: data[-40:],
)
async def test_other_list_of_models_is_ignored(endpoint_at: EndpointAt, data: bytes) -> None:
    async with ScriptedServer(_V1(data)) as server:
        assert await fetch_ready_models(endpoint_at(server.url)) is ANY_MODEL
        assert len(server.requests) == 2


async def test_both_lists_of_models_share_one_time_limit(
    endpoint_at: EndpointAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.upstream.pool.checks._LIST_TIMEOUT", 0.3)

    async def slow(connection: Connection) -> None:
        while await connection.request():
            await asyncio.sleep(0.2)
            await connection.send(http_response(status="404 Not Found"))

    async with ScriptedServer(slow) as server:
        endpoint = endpoint_at(server.url)
        with pytest.raises(GatewayError) as caught:
            await fetch_ready_models(endpoint)
        await endpoint.close()
    assert caught.value.kind is ErrorKind.SERVER_TIMEOUT
    assert caught.value.message == f"{server.url} sent no list of models within 0.3 s"


def _ready_entry(name: str, version: object = None, state: str = "READY") -> dict[str, Any]:
    return {"name": name, "version": version, "state": state}


@pytest.mark.parametrize(
    ("document", "models"),
    [
        ([], ready()),
        ([{"name": "m"}], ready("m")),
        (
            [_ready_entry("m", "1"), _ready_entry("m", "2"), _ready_entry("n", "1")],
            ready("m/1", "m/2", "n/1"),
        ),
        ([_ready_entry("m", 7)], ready("m/7")),
        (
            [
                _ready_entry("m", "1"),
                _ready_entry("m", "2", "UNAVAILABLE"),
                _ready_entry("n", "1", "LOADING"),
            ],
            ready("m/1"),
        ),
        # One entry without a version is enough: the model may have other versions.
        ([_ready_entry("m", "1"), _ready_entry("m")], ready("m")),
        ([_ready_entry("m", "")], ready("m")),
        ({"models": ["a", "b"]}, ready("a", "b")),
    ],
)
def test_lists_of_models_are_parsed(document: Any, models: ReadyModels) -> None:
    assert parse_ready_models(document) == models


@pytest.mark.parametrize("document", [5, {}, {"models": [1]}, [1], [{"state": "READY"}]], ids=repr)
def test_other_documents_are_errors(document: Any) -> None:
    with pytest.raises((TypeError, KeyError, AttributeError)):
        parse_ready_models(document)


def test_names_are_sorted() -> None:
    assert ready("b/1", "a/2", "a/1").names == ("a", "b")
    assert ANY_MODEL.names is None
