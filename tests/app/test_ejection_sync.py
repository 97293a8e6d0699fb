"""Gateways that share their ejections, as workers do."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack

import pytest

from gateway.app import ejection_sync
from gateway.app.gateway import Gateway
from gateway.app.shared_memory import SharedMemory
from gateway.routing.endpoint_health import EjectionState
from gateway.settings.schema import Settings
from gateway.settings.upstreams import HealthCheck as HealthSettings
from gateway.upstream.pool import outlier_detection
from tests.support.gateway import no_leaks, until, worker_client, worker_of
from tests.support.http_messages import http_response
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, ScriptedServer


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll the shared ejections all the time."""
    monkeypatch.setattr(ejection_sync, "_POLL_INTERVAL", 0.01)


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


def _settings(*servers: ScriptedServer, time: str, connect_timeout: str = "1s") -> Settings:
    endpoints = [server.url for server in servers]
    return Settings.model_validate(
        {
            "listen": "127.0.0.1:0",
            "offload": 0,
            "upstreams": {
                "u": {
                    "endpoints": endpoints,
                    "dialect": "triton",
                    "outlier_detection": {"base_ejection_time": time},
                }
            },
            "limits": {"connect_timeout": connect_timeout, "drain_grace": 0},
        }
    )


def _first(gateway: Gateway) -> EjectionState:
    """Return the ejection state of the first endpoint."""
    return gateway.active_config.upstreams["u"].pool.members[0].ejection


async def _client(stack: AsyncExitStack, gateway: Gateway) -> RawClient:
    return await stack.enter_async_context(worker_client(gateway))


async def _ask(client: RawClient, times: int) -> list[int]:
    return [(await client.call("GET", "/v2/x")).status for _ in range(times)]


async def test_ejection_reaches_the_other_worker_also_after_a_reload() -> None:
    shared = SharedMemory.for_workers(2)
    async with no_leaks(), AsyncExitStack() as stack:
        bad = await stack.enter_async_context(_Server())
        good = [await stack.enter_async_context(ScriptedServer()) for _ in range(2)]
        settings = _settings(bad, *good, time="1500ms")
        one = await stack.enter_async_context(worker_of(settings, shared))
        other = await stack.enter_async_context(worker_of(settings, shared, slot=1))
        assert (await _ask(await _client(stack, one), 15)).count(502) == 5
        await until(lambda: _first(other).ejections == 1)
        assert _first(other).failures == 0
        # The new pool applies and publishes ejections.
        changed = _settings(bad, *good, time="1500ms", connect_timeout="2s")
        await (await other.prepare(changed)).commit()()
        assert _first(other).ejections == 1
        bad.well = True
        client = await _client(stack, other)
        while _first(other).ejections:
            await asyncio.sleep(0.01)
            assert set(await _ask(client, 3)) == {200}
        await until(lambda: not _first(one).ejections)
        assert len(bad.requests) >= 6


async def test_worker_that_starts_later_knows_the_ejections() -> None:
    shared = SharedMemory.for_workers(2)
    async with no_leaks(), AsyncExitStack() as stack:
        bad = await stack.enter_async_context(_Server())
        good = [await stack.enter_async_context(ScriptedServer()) for _ in range(2)]
        settings = _settings(bad, *good, time="60s")
        async with (
            worker_of(settings, shared) as one,
            worker_client(one) as client,
        ):
            await _ask(client, 15)
        late = await stack.enter_async_context(worker_of(settings, shared))
        await until(lambda: _first(late).ejections == 1)
        assert set(await _ask(await _client(stack, late), 9)) == {200}
        assert len(bad.requests) == 5


async def test_worker_that_starts_later_tells_no_ejection_that_was_told_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The time of the ejection is over, but the endpoint has not recovered."""
    shared = SharedMemory.for_workers(2)
    async with no_leaks(), AsyncExitStack() as stack:
        bad, good = [await stack.enter_async_context(each) for each in (_Server(), _Server())]
        good.well = True
        settings = _settings(bad, good, time="10ms")
        async with (
            worker_of(settings, shared) as one,
            worker_client(one) as client,
        ):
            while not _first(one).ejections:
                await _ask(client, 2)
        await until(lambda: _first(one).until < time.monotonic())
        late = await stack.enter_async_context(worker_of(settings, shared))
        await until(lambda: _first(late).ejections)
        client = await _client(stack, late)
        while _first(late).failures < 6:
            await _ask(client, 2)
        bad.well = True
        while _first(late).ejections:
            await _ask(client, 2)
    kinds = [each["kind"] for each in shared.journal(0).read()]
    told = [kind for kind in kinds if not kind.startswith("gateway")]
    assert told == ["ejection_ended", "endpoint_ejected"]
    assert _lines(caplog, "ejection ended") == 1


async def test_unreachable_upstream_is_not_ready_for_the_other_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outlier_detection, "_PROBE_INTERVAL", 0.05)
    shared = SharedMemory.for_workers(2)
    async with no_leaks(), AsyncExitStack() as stack:
        async with ScriptedServer() as server:
            port = server.port
            settings = _settings(server, time="60s")
            # One health check succeeds, and the next one is due after the test.
            upstream = settings.upstreams["u"]
            checked = upstream.model_copy(
                update={
                    "health_check": HealthSettings.model_validate({"path": "/up", "interval": "1h"})
                }
            )
            settings = settings.model_copy(update={"upstreams": {"u": checked}})
            one, other = [
                await stack.enter_async_context(worker_of(settings, shared, slot=slot))
                for slot in range(2)
            ]
            pools = [each.active_config.upstreams["u"].pool for each in (one, other)]
            await until(lambda: all(pool.any_healthy for pool in pools))
        assert 503 in await _ask(await _client(stack, one), 4)
        await until(lambda: pools[1].unreachable)
        missing = await other.active_config.router.readiness.check()
        assert missing == "upstream u (another worker cannot connect to upstream u)"
        async with ScriptedServer(port=port):
            await until(lambda: not any(pool.unreachable for pool in pools))


def _lines(caplog: pytest.LogCaptureFixture, part: str) -> int:
    """Return how many lines an operator sees who has not asked for those of DEBUG."""
    found = [each for each in caplog.records if part in each.getMessage()]
    return sum(each.levelno > logging.DEBUG for each in found)


async def test_ejection_that_two_workers_find_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ejection_sync, "_POLL_INTERVAL", 60.0)  # none learns it from the other
    shared = SharedMemory.for_workers(2)
    async with no_leaks(), AsyncExitStack() as stack:
        bad = await stack.enter_async_context(_Server())
        good = [await stack.enter_async_context(ScriptedServer()) for _ in range(2)]
        settings = _settings(bad, *good, time="3s")
        workers = [
            await stack.enter_async_context(worker_of(settings, shared, slot=slot))
            for slot in range(2)
        ]
        clients = [await _client(stack, each) for each in workers]
        for client in clients:
            assert (await _ask(client, 15)).count(502) == 5
        assert [_first(each).ejections for each in workers] == [1, 1]
        assert _lines(caplog, "failed 5 times in a row: ejected") == 1
        bad.well = True
        async with asyncio.timeout(30):
            for worker, client in zip(workers, clients, strict=True):
                while _first(worker).ejections:
                    await _ask(client, 3)
                    await asyncio.sleep(0.01)
        assert _lines(caplog, "ejection ended") == 1


async def test_unreachable_upstream_that_two_workers_find_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ejection_sync, "_POLL_INTERVAL", 60.0)
    monkeypatch.setattr(outlier_detection, "_PROBE_INTERVAL", 0.05)
    shared = SharedMemory.for_workers(2)
    async with no_leaks(), AsyncExitStack() as stack:
        async with ScriptedServer() as server:
            port = server.port
        settings = _settings(server, time="60s")
        workers = [
            await stack.enter_async_context(worker_of(settings, shared, slot=slot))
            for slot in range(2)
        ]
        pools = [each.active_config.upstreams["u"].pool for each in workers]
        for worker in workers:
            assert await _ask(await _client(stack, worker), 3) == [503] * 3
        assert all(pool.unreachable for pool in pools)
        assert _lines(caplog, "upstream u is not ready") == 1
        async with ScriptedServer(port=port):
            await until(lambda: not any(pool.unreachable for pool in pools))
        assert _lines(caplog, "upstream u is ready again") == 1


async def test_health_that_two_workers_find_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    shared = SharedMemory.for_workers(2)
    async with no_leaks(), AsyncExitStack() as stack:
        async with ScriptedServer() as server:
            port, url = server.port, server.url
            checks = {"path": "/up", "interval": "50ms", "timeout": "5s"}
            settings = _settings(server, time="60s")
            checked = settings.upstreams["u"].model_copy(
                update={"health_check": HealthSettings.model_validate(checks)}
            )
            settings = settings.model_copy(update={"upstreams": {"u": checked}})
            workers = [
                await stack.enter_async_context(worker_of(settings, shared, slot=slot))
                for slot in range(2)
            ]
            pools = [each.active_config.upstreams["u"].pool for each in workers]
            await until(lambda: all(pool.any_healthy for pool in pools))
        for _ in range(2):
            await until(lambda: caplog.text.count(f"{url} is unhealthy: ") == 2)
            assert _lines(caplog, f"{url} is unhealthy: ") == 1
            async with ScriptedServer(port=port):
                await until(lambda: caplog.text.count(f"{url} is healthy again: ") == 2)
                assert _lines(caplog, f"{url} is healthy again: ") == 1
                caplog.clear()


async def test_unexpected_error_is_logged_and_does_not_end_the_sync(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looks = 0

    def pools() -> dict[str, object]:
        nonlocal looks
        looks += 1
        raise KeyError

    shared = SharedMemory.for_workers(2).ejections
    async with (
        no_leaks(),
        ejection_sync.EjectionSync(shared, 0, pools),  # type: ignore[arg-type]
    ):
        await until(lambda: looks > 1)
    assert caplog.record_tuples[0][:2] == ("tensorgate", logging.ERROR)
    assert "the ejections of other workers could not be applied" in caplog.text
