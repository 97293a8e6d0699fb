import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import JSON, KSERVE, MLSERVER, TRITON
from gateway.routing.endpoint_health import HealthCheckPolicy
from gateway.upstream.pool import dialect as of_dialect
from gateway.upstream.pool.checks import HealthChecker, PoolSupervisor
from gateway.upstream.pool.dialect import DialectDetector
from gateway.upstream.pool.member import Member, Outcome
from gateway.upstream.pool.pool import Pool
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint, ScriptedUpstreamResponse
from tests.support.gateway import until
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import ScriptedServer, never_respond, respond_in_turn
from tests.upstream.endpoints import EndpointAt
from tests.upstream.pools import Responding, running, used

EXTENSIONS = ["binary_tensor_data", "model_configuration", "schedule_policy", "sequence", "trace"]
_TRITON = {"name": "triton", "version": "2.51.0", "extensions": EXTENSIONS}
_KSERVE = {"name": "kserve", "version": "0.15.0", "extensions": ["model_repository_extension"]}
NOWHERE = "http://127.0.0.1:1"


def _itself(document: object, status: str = "200 OK") -> bytes:
    return http_response(json.dumps(document).encode(), status=status)


OF_TRITON, OF_KSERVE = _itself(_TRITON), _itself(_KSERVE)
OF_MLSERVER = _itself({"name": "mlserver", "version": "1.7.1", "extensions": []})
GONE = http_response(status="503 Gone")


Asking = Callable[..., AbstractAsyncContextManager[tuple[Pool, DialectDetector]]]


@pytest.fixture
def asking(endpoint_at: EndpointAt) -> Asking:
    """Make pools that detect the dialect of their endpoints."""

    @asynccontextmanager
    async def asking(
        *urls: str,
        interval: float = 60,
        retry_delay: float = 60,
        logs_startup: bool = True,
        health_checker: HealthChecker | None = None,
    ) -> AsyncIterator[tuple[Pool, DialectDetector]]:
        dialect_detector = DialectDetector(
            "u", interval, retry_delay, logs_startup, random=lambda: 0.9
        )
        supervisor = PoolSupervisor(health_checker, dialect_detector=dialect_detector)
        async with running(Pool([endpoint_at(url) for url in urls], supervisor=supervisor)) as pool:
            yield pool, dialect_detector

    return asking


async def test_server_that_shows_its_dialect_is_asked_once(
    asking: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        ScriptedServer(Responding(OF_TRITON)) as server,
        asking(server.url, interval=9, retry_delay=0.01) as (pool, dialect_detector),
    ):
        await asyncio.gather(*(dialect_detector.wait_until_known() for _ in range(10)))
        assert dialect_detector.dialect == TRITON
        assert dialect_detector.reason.startswith(f"{server.url} names itself 'triton'")
        for _ in range(3):
            with used(pool.lease()):
                await asyncio.sleep(0.02)
        (received,) = server.requests
        assert received.head.first == "GET /v2 HTTP/1.1"
    (message,) = caplog.messages
    assert message == f"upstream u: dialect triton: {dialect_detector.reason}"
    assert caplog.records[0].levelno == logging.INFO


async def test_server_that_shows_no_dialect_is_asked_again(
    asking: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    """A placeholder may respond while the server starts."""
    itself = Responding(_itself({}, "404 Not Found"))
    async with (
        ScriptedServer(itself) as server,
        asking(server.url, interval=0.01) as (_, dialect_detector),
    ):
        await dialect_detector.wait_until_known()
        assert dialect_detector.dialect == JSON
        await until(lambda: len(server.requests) > 2)
        itself.data = OF_TRITON
        await until(lambda: dialect_detector.dialect == TRITON)
    (record,) = caplog.records  # that it is known now is logged at INFO
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"upstream u: dialect json: {server.url} returned")


async def test_waiting_call_asks_an_unreachable_server_at_once(
    asking: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedServer(Responding(OF_KSERVE)) as server:
        port = server.port
    async with asking(server.url) as (_, dialect_detector):
        for _ in range(3):
            with pytest.raises(GatewayError, match=server.url) as caught:
                await dialect_detector.wait_until_known()
            assert caught.value.kind is ErrorKind.UNREACHABLE
        assert dialect_detector.dialect is None
        assert dialect_detector.reason == caught.value.message
        assert caplog.messages == [f"upstream u: dialect unknown: {dialect_detector.reason}"]
        async with ScriptedServer(Responding(OF_KSERVE), port=port):
            await dialect_detector.wait_until_known()
        assert dialect_detector.dialect == KSERVE


@pytest.mark.parametrize("status", ["500 Broken", "429 Too Many"])
async def test_temporary_error_shows_no_dialect(asking: Asking, status: str) -> None:
    itself = Responding(_itself({"error": "starting"}, status))
    async with ScriptedServer(itself) as server, asking(server.url) as (_, dialect_detector):
        with pytest.raises(GatewayError, match=f"{server.url} returned {status[:3]} to GET /v2"):
            await dialect_detector.wait_until_known()
        assert dialect_detector.dialect is None
        itself.data = OF_MLSERVER
        await dialect_detector.wait_until_known()
        assert dialect_detector.dialect == MLSERVER


async def test_hanging_server_does_not_delay_the_others(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        ScriptedServer(never_respond) as silent,
        ScriptedServer(Responding(OF_TRITON)) as server,
        asking(silent.url, server.url) as (_, dialect_detector),
    ):
        await dialect_detector.wait_until_known()
        assert dialect_detector.dialect == TRITON
    monkeypatch.setattr(of_dialect, "TIMEOUT", 0.01)
    async with ScriptedServer(never_respond) as silent, asking(silent.url) as (_, dialect_detector):
        with pytest.raises(
            GatewayError, match=f"{silent.url} did not respond to GET /v2"
        ) as caught:
            await dialect_detector.wait_until_known()
        assert caught.value.kind is ErrorKind.SERVER_TIMEOUT


async def test_server_that_fails_is_asked_after_ever_longer_pauses() -> None:
    errors = [GatewayError(ErrorKind.UNREACHABLE, "refused") for _ in range(4)]
    well = ScriptedUpstreamResponse(200, {}, [json.dumps(_TRITON).encode()])
    member = Member(ScriptedEndpoint(EventLog(), *errors, well, errors[0]))
    dialect_detector = DialectDetector("u", interval=5, retry_delay=1)
    assert [await dialect_detector.probe(member) for _ in range(6)] == [1, 2, 4, 5, 50, 1]


async def test_waiting_call_fails_when_the_pool_closes(asking: Asking) -> None:
    async with (
        ScriptedServer(never_respond) as server,
        asking(server.url) as (pool, dialect_detector),
    ):
        waiting = asyncio.create_task(dialect_detector.wait_until_known())
        await server.connection()
        await pool.close()
        with pytest.raises(GatewayError, match="the dialect of upstream 'u' cannot be detected"):
            await waiting


def _fail(pool: Pool, number: int = 0) -> None:
    lease = pool.lease_all()[number]
    lease.acquire()
    lease.release(Outcome.FAILED, "it is gone")


async def test_failures_in_a_row_recheck_once(asking: Asking) -> None:
    async with (
        ScriptedServer(Responding(OF_TRITON)) as server,
        asking(server.url, retry_delay=0.2) as (pool, dialect_detector),
    ):
        await dialect_detector.wait_until_known()
        dialect = dialect_detector.dialect
        for _ in range(100):
            _fail(pool)
            await asyncio.sleep(0)
        await until(lambda: len(server.requests) == 2)
        await asyncio.sleep(0.1)
        assert len(server.requests) == 2
        assert dialect_detector.dialect is dialect


async def test_known_dialect_stays_while_a_server_is_down(asking: Asking) -> None:
    script = respond_in_turn(OF_KSERVE)
    async with (
        ScriptedServer(script) as server,
        asking(server.url, retry_delay=0.01) as (pool, one),
    ):
        await one.wait_until_known()
        port = server.port
        await server.__aexit__(None, None, None)
        _fail(pool)
        await until(lambda: one._error.kind is ErrorKind.UNREACHABLE and one._error.message)
        await one.wait_until_known()
        assert one.dialect == KSERVE
        async with ScriptedServer(Responding(OF_TRITON), port=port):
            await until(lambda: one.dialect == TRITON)
        await server.__aenter__()


def _told(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


async def _asked(server: ScriptedServer, more: int) -> None:
    """Wait until a server got this many more requests."""
    before = len(server.requests)
    await until(lambda: len(server.requests) >= before + more)


async def test_loss_of_the_only_server_is_logged_once(
    asking: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    itself = Responding(OF_KSERVE)
    async with (
        ScriptedServer(itself) as server,
        asking(server.url, interval=0.02, retry_delay=0.01) as (pool, dialect_detector),
    ):
        await dialect_detector.wait_until_known()
        for _ in range(2):  # outages
            caplog.clear()
            itself.data = GONE
            _fail(pool)
            await _asked(server, 4)
            itself.data = OF_KSERVE
            await until(lambda: any("again" in message for message in caplog.messages))
            _fail(pool)
            await _asked(server, 1)
            assert _told(caplog) == [
                (
                    logging.WARNING,
                    f"upstream u: dialect detection failed: {server.url} returned 503 to GET /v2; "
                    "keeping dialect kserve",
                ),
                (logging.INFO, f"upstream u: {server.url} is reachable again"),
            ]


async def test_loss_that_is_logged_elsewhere_is_not_logged_again(
    asking: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    """Health checks log it, and so do ejections if there are several endpoints."""
    itself = Responding(OF_KSERVE)
    health_checker = HealthChecker("/", 60, 5, HealthCheckPolicy(1, 1), random=lambda: 0.9)
    async with ScriptedServer(itself) as server, ScriptedServer(Responding(OF_KSERVE)) as other:
        for urls, probed in (((server.url,), health_checker), ((server.url, other.url), None)):
            itself.data = OF_KSERVE
            async with asking(*urls, interval=0.02, retry_delay=0.01, health_checker=probed) as (
                pool,
                _,
            ):
                await until(lambda: all(member.detected_dialect for member in pool.members))
                if probed is not None:
                    await until(lambda: pool.members[0].probed.healthy)
                itself.data = GONE
                _fail(pool)
                await _asked(server, 3)
    assert _told(caplog) == []


async def test_first_detection_is_logged_by_one_worker(
    asking: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tensorgate.upstream")
    itself = Responding(GONE)
    async with (
        ScriptedServer(itself) as server,
        asking(server.url, retry_delay=0.01, logs_startup=False) as (pool, dialect_detector),
    ):
        await until(lambda: caplog.records)
        itself.data = OF_KSERVE
        await dialect_detector.wait_until_known()
        assert [level for level, _ in _told(caplog)] == [logging.DEBUG, logging.DEBUG]
        caplog.clear()
        itself.data = OF_TRITON
        _fail(pool)
        await until(lambda: dialect_detector.dialect == TRITON)
        # Later detections may differ between workers, so each logs its own.
        assert [level for level, _ in _told(caplog)] == [logging.INFO]


async def test_different_servers_are_logged_and_the_dialect_follows_them(
    asking: Asking, endpoint_at: EndpointAt, caplog: pytest.LogCaptureFixture
) -> None:
    other = Responding(OF_MLSERVER)
    async with (
        ScriptedServer(Responding(OF_TRITON)) as first,
        ScriptedServer(other) as second,
        ScriptedServer(Responding(OF_TRITON)) as third,
        ScriptedServer(Responding(OF_KSERVE)) as kserve,
        asking(first.url, second.url, third.url, retry_delay=0.01) as (pool, dialect_detector),
    ):
        await until(lambda: all(member.detected_dialect for member in pool.members))
        dialect = dialect_detector.dialect
        assert dialect is not None
        assert not dialect.binary
        assert dialect.trace is None
        assert "its endpoints differ" in dialect_detector.reason
        assert f"triton: {first.url} names itself" in dialect_detector.reason
        assert f"json: {second.url} names itself" in dialect_detector.reason
        assert third.url not in dialect_detector.reason
        assert any(dialect_detector.reason in message for message in caplog.messages)
        other.data = OF_TRITON
        _fail(pool, 1)
        await until(lambda: dialect_detector.dialect == TRITON)
        assert "differ" not in dialect_detector.reason
        # The servers of the pool count. Until new ones are detected, the dialect stays.
        pool.set_endpoints([endpoint_at(kserve.url), pool.endpoints[0]])
        await until(lambda: dialect_detector.dialect != TRITON)
        assert "its endpoints differ" in dialect_detector.reason
        pool.set_endpoints(pool.endpoints[:1])
        assert dialect_detector.dialect == KSERVE
        pool.set_endpoints([endpoint_at(NOWHERE)])
        assert dialect_detector.dialect == KSERVE


async def test_new_pool_adopts_detected_dialects(asking: Asking, endpoint_at: EndpointAt) -> None:
    script = respond_in_turn(OF_KSERVE)
    async with (
        ScriptedServer(script, never_respond) as server,
        asking(server.url) as (before, known),
    ):
        await known.wait_until_known()
        async with asking(server.url) as (pool, dialect_detector):
            pool.adopt_state(before)
            await dialect_detector.wait_until_known()
            assert dialect_detector.dialect == KSERVE
            await server.connection(1)  # it is asked again all the same
