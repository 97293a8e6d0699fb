"""Gateways that share their ejections, as workers do."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.app import ejection_sync
from gateway.app.ejection_sync import EjectionSync
from gateway.app.gateway import Gateway
from gateway.app.shared_memory import SharedMemory
from gateway.routing.endpoint_health import EjectionState
from gateway.settings.schema import Settings
from gateway.upstream.pool import outlier_detection
from gateway.upstream.pool.pool import Pool
from gateway.workers.shared_records import SharedDocuments
from tests.support.gateway import no_leaks, until, worker_client, worker_of
from tests.support.http_messages import http_response
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, ScriptedServer


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll the shared ejections, and probe unreachable upstreams, all the time."""
    monkeypatch.setattr(ejection_sync, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(outlier_detection, "PROBE_INTERVAL", 0.05)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no worker learn anything from the other."""
    monkeypatch.setattr(ejection_sync, "POLL_INTERVAL", 60.0)


class _Server(ScriptedServer):
    """Closes connections without a response until it is healthy."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.well = False

    async def _answer(self, connection: Connection) -> None:
        while True:
            await connection.request()
            if not self.well:
                return
            await connection.send(http_response())


class _Workers:
    """Workers that share their memory."""

    def __init__(self, stack: AsyncExitStack, shared: SharedMemory) -> None:
        self._stack = stack
        self.shared = shared

    async def start(self, settings: Settings, slot: int = 0) -> Gateway:
        return await self._stack.enter_async_context(worker_of(settings, self.shared, slot=slot))

    async def start_two(self, settings: Settings) -> tuple[Gateway, Gateway]:
        return await self.start(settings), await self.start(settings, slot=1)

    async def client(self, worker: Gateway) -> RawClient:
        return await self._stack.enter_async_context(worker_client(worker))

    async def bad_and_good(self, *, time: str) -> tuple[_Server, Settings]:
        """Start a server that fails, and two that do not; return it, and settings for all."""
        servers = [await self._stack.enter_async_context(_Server()) for _ in range(3)]
        for each in servers[1:]:
            each.well = True
        return servers[0], _settings(*servers, time=time)


@pytest.fixture
async def workers() -> AsyncIterator[_Workers]:
    shared = SharedMemory.for_workers(2)
    async with no_leaks(), AsyncExitStack() as stack:
        yield _Workers(stack, shared)


def _settings(
    *servers: ScriptedServer, time: str = "60s", connect_timeout: str = "1s", **more: Any
) -> Settings:
    upstream = {
        "endpoints": [server.url for server in servers],
        "dialect": "triton",
        "outlier_detection": {"base_ejection_time": time},
        **more,
    }
    return Settings.model_validate(
        {
            "listen": "127.0.0.1:0",
            "offload": 0,
            "upstreams": {"u": upstream},
            "limits": {"connect_timeout": connect_timeout, "drain_grace": 0},
        }
    )


def _pool(gateway: Gateway) -> Pool:
    return gateway.active_config.upstreams["u"].pool


def _first(gateway: Gateway) -> EjectionState:
    """Return the ejection state of the first endpoint."""
    return _pool(gateway).members[0].ejection


async def _ask(client: RawClient, times: int) -> list[int]:
    return [(await client.call("GET", "/v2/x")).status for _ in range(times)]


async def _ask_until_used(worker: Gateway, client: RawClient) -> None:
    async with asyncio.timeout(30):
        while _first(worker).ejections:
            assert set(await _ask(client, 3)) == {200}


def _lines(caplog: pytest.LogCaptureFixture, part: str) -> int:
    """Return how many lines an operator sees who has not asked for those of DEBUG."""
    found = [each for each in caplog.records if part in each.getMessage()]
    return sum(each.levelno > logging.DEBUG for each in found)


def _told(workers: _Workers) -> list[str]:
    """Return the kinds of events in the journal, newest first."""
    return [each["kind"] for each in workers.shared.owner_journal.read()]


async def test_ejection_reaches_the_other_worker_also_after_a_reload(workers: _Workers) -> None:
    bad, settings = await workers.bad_and_good(time="1500ms")
    one, other = await workers.start_two(settings)
    assert (await _ask(await workers.client(one), 15)).count(502) == 5
    await until(lambda: _first(other).ejections == 1)
    assert _first(other).failures == 0
    # The new pool applies and publishes ejections.
    limits = settings.limits.model_copy(update={"connect_timeout": 2.0})
    changed = settings.model_copy(update={"limits": limits})
    await (await other.prepare(changed)).commit()()
    assert _first(other).ejections == 1
    bad.well = True
    await _ask_until_used(other, await workers.client(other))
    await until(lambda: not _first(one).ejections)
    assert len(bad.requests) >= 6


async def test_worker_that_starts_later_knows_the_ejections(workers: _Workers) -> None:
    bad, settings = await workers.bad_and_good(time="60s")
    async with worker_of(settings, workers.shared) as one, worker_client(one) as client:
        await _ask(client, 15)
    for slot in (0, 1):  # in its place, or in another one
        late = await workers.start(settings, slot)
        await until(lambda late=late: _first(late).ejections == 1)  # type: ignore[misc]
        assert set(await _ask(await workers.client(late), 9)) == {200}
    assert len(bad.requests) == 5


async def test_worker_that_starts_later_tells_no_ejection_that_was_told_before(
    workers: _Workers, caplog: pytest.LogCaptureFixture
) -> None:
    """The time of the ejection is over, but the endpoint has not recovered."""
    bad, settings = await workers.bad_and_good(time="10ms")
    async with worker_of(settings, workers.shared) as one, worker_client(one) as client:
        while not _first(one).ejections:
            await _ask(client, 2)
    await until(lambda: _first(one).until < time.monotonic())
    late = await workers.start(settings)
    await until(lambda: _first(late).ejections)
    client = await workers.client(late)
    while _first(late).failures < 6:
        await _ask(client, 2)
    bad.well = True
    await _ask_until_used(late, client)
    assert _told(workers) == ["ejection_ended", "endpoint_ejected"]
    assert _lines(caplog, "ejection ended") == 1


async def test_unreachable_upstream_is_not_ready_for_the_other_worker(workers: _Workers) -> None:
    async with ScriptedServer() as server:
        port = server.port
        # One health check succeeds, and the next one is due after the test.
        settings = _settings(server, health_check={"path": "/up", "interval": "1h"})
        one, other = await workers.start_two(settings)
        await until(lambda: _pool(one).any_healthy and _pool(other).any_healthy)
    assert 503 in await _ask(await workers.client(one), 4)
    await until(lambda: _pool(other).unreachable)
    missing = await other.active_config.router.readiness.check()
    assert missing == "upstream u (another worker cannot connect to upstream u)"
    async with ScriptedServer(port=port):
        await until(lambda: not (_pool(one).unreachable or _pool(other).unreachable))


@pytest.mark.usefixtures("alone")
async def test_ejection_that_two_workers_find_is_one_line_in_the_log_and_one_event(
    workers: _Workers, caplog: pytest.LogCaptureFixture
) -> None:
    bad, settings = await workers.bad_and_good(time="3s")
    both = await workers.start_two(settings)
    clients = [await workers.client(each) for each in both]
    for client in clients:
        assert (await _ask(client, 15)).count(502) == 5
    assert [_first(each).ejections for each in both] == [1, 1]
    assert _lines(caplog, "failed 5 times in a row: ejected") == 1
    bad.well = True
    for worker, client in zip(both, clients, strict=True):
        await _ask_until_used(worker, client)
    assert _lines(caplog, "ejection ended") == 1
    assert _told(workers) == ["ejection_ended", "endpoint_ejected"]


@pytest.mark.usefixtures("alone")
async def test_unreachable_upstream_that_two_workers_find_is_one_line_and_one_event(
    workers: _Workers, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedServer() as server:
        port = server.port
    both = await workers.start_two(_settings(server))
    for worker in both:
        assert await _ask(await workers.client(worker), 3) == [503] * 3
    assert all(_pool(worker).unreachable for worker in both)
    assert _lines(caplog, "upstream u is not ready") == 1
    async with ScriptedServer(port=port):
        await until(lambda: not any(_pool(worker).unreachable for worker in both))
    assert _lines(caplog, "upstream u is ready again") == 1
    assert _told(workers) == ["upstream_reachable", "upstream_unreachable"]


async def test_health_that_two_workers_find_is_one_line_in_the_log_and_one_event(
    workers: _Workers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with ScriptedServer() as server:
        port, url = server.port, server.url
        checks = {"path": "/up", "interval": "50ms", "timeout": "5s"}
        both = await workers.start_two(_settings(server, health_check=checks))
        await until(lambda: all(_pool(each).any_healthy for each in both))
    for _ in range(2):
        await until(lambda: caplog.text.count(f"{url} is unhealthy: ") == 2)
        assert _lines(caplog, f"{url} is unhealthy: ") == 1
        async with ScriptedServer(port=port):
            await until(lambda: caplog.text.count(f"{url} is healthy again: ") == 2)
            assert _lines(caplog, f"{url} is healthy again: ") == 1
            caplog.clear()
    health = [each for each in _told(workers) if each.startswith("endpoint")]
    assert health[-4:] == ["endpoint_healthy", "endpoint_unhealthy"] * 2


async def test_unexpected_error_is_logged_and_does_not_end_the_sync(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looks = 0

    def pools() -> dict[str, Pool]:
        nonlocal looks
        looks += 1
        raise KeyError

    async with no_leaks(), EjectionSync(SharedDocuments(1), 0, pools):
        await until(lambda: looks > 1)
    assert caplog.record_tuples[0][:2] == ("tensorgate", logging.ERROR)
    assert "the ejections of other workers could not be applied" in caplog.text


def test_newest_thousand_endpoints_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ejection_sync, "MAX_SAID", 10)
    documents = SharedDocuments(2)
    syncs = [EjectionSync(documents, slot, dict) for slot in range(2)]
    for number in range(30):
        syncs[0].publish("u", f"http://{number}", EjectionState(ejections=1, until=1e9))
    assert list(syncs[1].read()) == [f"u http://{number}" for number in range(20, 30)]
    assert syncs[1].publish("u", "http://29", EjectionState(ejections=1, until=1e9))
    assert not syncs[1].publish("v", "http://29", EjectionState(ejections=1, until=1e9))
    # The worker that takes the place of one goes on with its list.
    assert EjectionSync(documents, 0, dict).publish("u", "http://28", EjectionState(1, 1, 1e9))
    assert "u http://27" in syncs[1].read()
