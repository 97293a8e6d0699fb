"""The pages of the admin address, and what the operator's page shows: one state, and new calls."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.view import GatewayView, run_to_end
from gateway.app import status_publisher
from gateway.app.standalone import StandaloneGateway
from gateway.settings.schema import Settings
from gateway.settings.sections import Admin
from tests.admin.site import ChosenSource
from tests.support.addresses import free_address
from tests.support.gateway import LIMITS, gateway_of, no_leaks, until
from tests.support.gateway_process import FAST_FILE_WATCH, gateway_process, write_settings
from tests.support.http_messages import http_response, request
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond, never_respond

NOWHERE = "http://127.0.0.1:1"


def _settings(url: str, **more: Any) -> Settings:
    return Settings.model_validate(
        {
            "listen": "127.0.0.1:0",
            "admin": free_address(),
            "upstreams": {"u": {"endpoints": [url], "dialect": "triton"}},
            "limits": LIMITS,
            **more,
        }
    )


@asynccontextmanager
async def _admin(url: str, **more: Any) -> AsyncIterator[tuple[StandaloneGateway, RawClient]]:
    settings = _settings(url, **more)
    async with (
        gateway_of(settings) as gateway,
        connect(f"http://{settings.admin.listen}") as client,
    ):
        yield gateway, client


def _metrics(text: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


async def test_operators_have_an_address_of_their_own_also_without_servers() -> None:
    async with _admin(NOWHERE) as (gateway, operator), connect(gateway.addresses[0]) as client:
        assert gateway.addresses[1] == f"http://{gateway.settings.admin.listen} (admin)"
        assert (await operator.call("GET", "/")).body == b"/live\n/ready\n/status\n/metrics\n"
        assert (await operator.call("GET", "/v2/health/live")).status == 404
        assert (await client.call("GET", "/live")).status == 503  # asked of the server
        assert (await operator.call("GET", "/live")).status == 200
        reply = await operator.call("GET", "/ready")
        assert reply.status == 503
        reason = "not ready: upstream u (cannot connect to http://127.0.0.1:1"
        assert reply.error.startswith(reason)


async def test_gateway_is_ready_if_its_servers_are() -> None:
    async with (
        ScriptedServer(always_respond(http_response())) as server,
        _admin(server.url) as (_, client),
    ):
        assert (await client.call("GET", "/ready")).status == 200


async def test_gateway_is_not_ready_while_it_drains() -> None:
    async with ScriptedServer(never_respond) as server:
        settings = _settings(server.url, limits={**LIMITS, "drain_timeout": 5})
        gateway = StandaloneGateway(settings)
        await gateway.__aenter__()
        async with (
            connect(f"http://{settings.admin.listen}") as operator,
            connect(gateway.addresses[0]) as client,
        ):
            assert (await operator.call("GET", "/live")).status == 200
            await client.send(request("GET", "/v2/x"))
            await until(lambda: gateway.listener.requests == 1)
            leaving = asyncio.create_task(gateway.__aexit__(None, None, None))
            await until(lambda: gateway.listener.draining)
            reply = await operator.call("GET", "/ready")
            assert (reply.status, reply.json) == (503, {"error": "not ready: draining"})
            assert (await operator.call("GET", "/live")).status == 200
            assert (await operator.call("GET", "/status")).json["draining"] is True
            assert b"\ntensorgate_draining 1.0\n" in (await operator.call("GET", "/metrics")).body
        await leaving


async def test_status_and_metrics_show_calls_and_endpoints() -> None:
    async with (
        ScriptedServer(never_respond) as server,
        _admin(server.url, concurrency={"max_requests": 7}) as (gateway, client),
        connect(gateway.addresses[0]) as busy,
    ):
        await busy.send(request("GET", "/v2/x"))
        await until(lambda: gateway.listener.requests == 1)
        status = (await client.call("GET", "/status")).json
        reply = await client.call("GET", "/metrics")
    (worker,) = status["workers"]
    assert (worker["pid"], worker["connections"]) == (os.getpid(), 1)
    sums = {"connections": 1, "requests_in_progress": 1, "draining": False}
    assert {name: status[name] for name in sums} == sums
    assert status["concurrency"] == {"active": 1, "queued": 0, "max_requests": 7}
    assert status["settings"]["number"] == 1
    upstream = status["upstreams"]["u"]
    known = {"required": True, "healthy": None, "concurrency": None}
    assert {name: upstream[name] for name in known} == known
    assert upstream["dialect"] == {"name": "triton", "reason": "configured"}
    (endpoint,) = upstream["endpoints"]
    assert (endpoint["url"], endpoint["requests_in_progress"]) == (server.url, 1)
    assert (reply.head.get("Content-Type") or "").startswith("text/plain; version=0.0.4")
    metrics = _metrics(reply.body)
    assert metrics["tensorgate_requests_in_progress"] == 1
    assert metrics["tensorgate_endpoint_requests_in_progress"] == 1
    assert metrics["tensorgate_endpoint_ejected"] == 0
    assert metrics["tensorgate_settings_current"] == 1
    assert metrics["process_cpu_seconds_total"] > 0
    assert "tensorgate_endpoint_healthy" not in metrics  # no probes are made


async def test_status_shows_the_dialect_of_the_servers() -> None:
    auto = {"u": {"endpoints": [NOWHERE], "dialect": "auto"}}
    async with _admin(NOWHERE, upstreams=auto) as (gateway, client):
        dialect_state = gateway.active_config.upstreams["u"].dialect_state
        await until(lambda: "cannot connect" in dialect_state.reason)
        told = (await client.call("GET", "/status")).json["upstreams"]["u"]["dialect"]
        assert told["name"] is None
        assert told["reason"].startswith(f"cannot connect to {NOWHERE}")
    itself = http_response(b'{"name": "kserve", "version": "0.15.0", "extensions": []}')
    async with ScriptedServer(always_respond(itself)) as server:
        auto["u"]["endpoints"] = [server.url]
        async with _admin(server.url, upstreams=auto) as (gateway, client):
            dialect_state = gateway.active_config.upstreams["u"].dialect_state
            await until(lambda: dialect_state.dialect)
            status = (await client.call("GET", "/status")).json
    assert status["upstreams"]["u"]["dialect"] == {
        "name": "kserve",
        "reason": f"{server.url} names itself 'kserve', version '0.15.0'",
    }


async def test_reload_moves_and_removes_the_admin_address() -> None:
    async with no_leaks():
        settings = _settings(NOWHERE)
        async with gateway_of(settings) as gateway:
            first = settings.admin.listen
            moved = settings.model_copy(update={"admin": _settings(NOWHERE).admin})
            await gateway.reload(moved)
            async with connect(f"http://{moved.admin.listen}") as client:
                assert (await client.call("GET", "/live")).status == 200
            with pytest.raises(ConnectionRefusedError):
                async with connect(f"http://{first}"):
                    pass
            await gateway.reload(settings.model_copy(update={"admin": Admin()}))
            assert len(gateway.addresses) == 1


@pytest.mark.asyncio(loop_factories=["uvloop"])  # the test's own loop, which proves nothing
@pytest.mark.parametrize("workers", [1, 2])
async def test_status_and_metrics_show_why_settings_failed(tmp_path: Path, workers: int) -> None:
    admin = free_address()
    file = tmp_path / "gateway.yaml"
    more = f"admin: {admin}\nworkers: {workers}\n"
    config = write_settings(file, NOWHERE, more=more)
    async with gateway_process(config, FAST_FILE_WATCH) as (process, _):
        await process.wait_for_output(r"listening on http://\S+ \(admin\)")
        file.write_text(file.read_text() + "nonsense: true\n")
        await process.wait_for_output("settings not reloaded")

        async def failures() -> float:
            async with connect(f"http://{admin}") as client:
                metrics = _metrics((await client.call("GET", "/metrics")).body)
                status = (await client.call("GET", "/status")).json
            last = status["settings"]["last_failure"]
            if metrics["tensorgate_settings_current"]:
                return 0
            assert "nonsense: unknown key" in last
            return metrics["tensorgate_reload_failures_total"]

        async with asyncio.timeout(5):
            while not await failures():  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.02)


async def test_cancelled_caller_waits_for_the_end() -> None:
    may_end, ended = asyncio.Event(), False

    async def work() -> None:
        nonlocal ended
        await may_end.wait()
        ended = True

    caller = asyncio.create_task(run_to_end(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended


@pytest.fixture
async def source() -> AsyncIterator[ChosenSource]:
    async with no_leaks():
        yield ChosenSource()


async def test_operators_who_look_at_once_see_one_state(source: ChosenSource) -> None:
    """Workers are asked once a second, however many pages are open."""
    async with GatewayView(source) as view:
        await asyncio.gather(
            *(view.overview({}) for _ in range(20)),
            *(view.topology({}) for _ in range(20)),
            *(view.models({}) for _ in range(20)),
        )
    assert source.asked == 1


async def test_state_that_cannot_be_read_is_tried_again(source: ChosenSource) -> None:
    async with GatewayView(source) as view:
        source.error = RuntimeError("nonsense")
        with pytest.raises(RuntimeError):
            await view.overview({})
        source.error = None
        assert (await view.overview({}))["now"]["connections"] == 3


async def test_invalid_query_asks_no_worker(source: ChosenSource) -> None:
    async with GatewayView(source) as view:
        for describe in (view.topology, view.calls):
            with pytest.raises(ValueError, match="limit"):
                await describe({"limit": "x"})
    assert source.asked == 0


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe calls fifty times a second."""
    monkeypatch.setattr(status_publisher, "LAG_INTERVAL", 0.005)
    monkeypatch.setattr("gateway.admin.history.INTERVAL", 0.02)
    monkeypatch.setattr("gateway.admin.view._CACHE_SECONDS", 0.0)


async def _only_call(operator: RawClient) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while True:
            reply = await operator.call("GET", "/api/calls", headers={"Host": "localhost"})
            if calls := reply.json["calls"]:
                call: dict[str, Any] = calls[0]
                return call
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("fast")
async def test_call_whose_client_leaves_shows_the_wait_for_the_server() -> None:
    async with ScriptedServer(never_respond) as server, _admin(server.url) as (gateway, operator):
        async with connect(gateway.addresses[0]) as client:
            await client.send(request("GET", "/v2/models/m/ready"))
            await server.connection()
            await asyncio.sleep(0.05)
        call = await _only_call(operator)
    assert (call["status"], call["endpoint"]) == (0, server.url)
    stages = {each["name"]: each["duration_ms"] for each in call["timeline"]}
    assert stages["server"] >= 45
    assert sum(stages.values()) == pytest.approx(call["duration_ms"], abs=5)
    assert stages.get("send", 0) < 5
