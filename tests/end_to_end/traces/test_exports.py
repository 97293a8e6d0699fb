"""Sampling, receivers that fail, reloads and stops: no call is touched, and drops are counted."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.app.gateway import Gateway
from gateway.observe.gateway_metrics import DROPPED_SPANS, EXPORTED_SPANS
from gateway.settings.schema import Settings
from tests.end_to_end.traces.conftest import SAMPLED, TRACE, Traced
from tests.support.addresses import free_address
from tests.support.gateway import checked_gateway, until
from tests.support.http_messages import http_response, request
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.support.servers.trace_receiver import TraceReceiver, trace_receiver

GET = request("GET", "/v2/models/m")
GOOD = always_respond(http_response(b"{}"))
UNSAMPLED = {"traceparent": SAMPLED["traceparent"][:-2] + "00", "tracestate": "a=1"}


def _with(headers: dict[str, str]) -> bytes:
    return request("GET", "/v2/models/m", headers=headers)


def _sums(gateway: Gateway) -> tuple[float, dict[str, float]]:
    """Return the spans that were exported, and those that were dropped by their reason."""
    store = gateway.metric_store
    dropped = {reason: count for (reason,), (count,) in store.sums(DROPPED_SPANS).items() if count}
    return store.sums(EXPORTED_SPANS)[()][0], dropped


async def test_caller_that_is_not_sampled_passes_untouched(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with ScriptedServer(GOOD) as server:
        async with traced(server.url) as gateway, gateway.client() as client:
            assert (await client.ask(path(_with(UNSAMPLED)))).status == 200
        head = server.requests[0].head
        assert {name: head.get(name) for name in UNSAMPLED} == UNSAMPLED
    assert receiver.spans == []


@pytest.mark.parametrize("sample", ["0%", "100%"])
async def test_caller_without_a_trace_is_sampled_by_the_ratio(
    sample: str, path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with ScriptedServer(GOOD) as server:
        async with traced(server.url, sample=sample) as gateway, gateway.client() as client:
            assert (await client.ask(path(GET))).status == 200
        parent = server.requests[0].head.get("traceparent")
    if sample == "0%":
        assert (parent, receiver.spans) == (None, [])
    else:
        (attempt,) = receiver.attempts()
        assert parent == f"00-{attempt.trace_id}-{attempt.span_id}-01"
        assert receiver.call().parent_id == ""
        assert receiver.call().holds(attempt)


@pytest.mark.parametrize(
    "headers",
    [
        "traceparent: 00-nonsense\r\ntracestate: a=1\r\n",
        f"traceparent: {SAMPLED['traceparent']}\r\n" * 2 + "tracestate: a=1\r\n",
        f"TRACEPARENT: {SAMPLED['traceparent'].upper()}\r\ntracestate: a=1\r\n",
        "tracestate: a=1\r\n",
    ],
)
async def test_invalid_trace_of_a_caller_is_replaced_where_the_call_is_sampled(
    headers: str, path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    data = GET.replace(b"\r\n", b"\r\n" + headers.encode(), 1)
    async with ScriptedServer(GOOD) as server:
        async with traced(server.url) as gateway, gateway.client() as client:
            assert (await client.ask(path(data))).status == 200
        head = server.requests[0].head
        (attempt,) = receiver.attempts()
        assert head.all("traceparent") == [f"00-{attempt.trace_id}-{attempt.span_id}-01"]
        assert head.all("tracestate") == []
    assert attempt.trace_id != TRACE


async def test_log_and_exemplars_name_a_trace_that_the_gateway_began(
    tmp_path: Path, path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    log = tmp_path / "log"
    general = {"log": {"access": {"path": str(log), "format": "json"}}}
    async with ScriptedServer(GOOD) as server, traced(server.url, general=general) as gateway:
        async with gateway.client() as client:
            assert (await client.ask(path(GET))).status == 200
        exemplars = gateway.gateway.call_metrics.exemplars()
    (line,) = log.read_text().splitlines()
    trace_id = receiver.call().trace_id
    assert json.loads(line)["trace_id"] == trace_id
    assert [exemplar[1] for exemplar in exemplars] == [trace_id]


async def test_without_tracing_nothing_is_loaded_or_started() -> None:
    """A fresh interpreter, since the tests load it all."""
    program = (
        "import sys; import gateway.app.gateway; lazy = ('opentelemetry', 'grpc', 'google'); "
        "print([name for name in sys.modules if name.startswith(lazy)])"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.decode().strip() == "[]"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_receiver_that_is_not_there_touches_no_call(
    protocol: str, path: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "tracing": {"endpoint": f"http://{free_address()}", "protocol": protocol},
        "limits": {"drain_timeout": 0.2},
    }
    async with ScriptedServer(GOOD) as server:
        settings["upstreams"] = {"u": {"endpoints": [server.url], "dialect": "triton"}}
        async with (
            checked_gateway(Settings.model_validate(settings)) as running,
            running.client() as client,
        ):
            for _ in range(20):
                assert (await client.ask(path(GET))).status == 200
    assert _sums(running.gateway) == (0, {"export_failed": 40})
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len([each for each in warnings if "spans were not exported to http://" in each]) == 1


@pytest.mark.parametrize(("status", "delay"), [(500, 0.0), (200, 0.05)])
async def test_receiver_that_fails_or_is_slow_touches_no_call(
    status: int, delay: float, traced: Traced, receiver: TraceReceiver
) -> None:
    receiver.status, receiver.delay = status, delay
    async with ScriptedServer(GOOD) as server, traced(server.url) as gateway:
        async with gateway.client() as client:
            for _ in range(20):
                assert (await client.ask(GET)).status == 200
        await gateway.until_idle()
    exported, dropped = _sums(gateway.gateway)
    assert (exported, dropped) == ((40, {}) if status == 200 else (0, {"export_failed": 40}))


async def test_reload_changes_where_spans_go(traced: Traced, receiver: TraceReceiver) -> None:
    with trace_receiver("grpc") as other:
        async with ScriptedServer(GOOD) as server, traced(server.url) as gateway:
            off = gateway.gateway.settings
            to_other = Settings.model_validate(
                {**off.model_dump(exclude_unset=True), "tracing": other.settings}
            )
            for settings in (to_other, off.model_copy(update={"tracing": None}), off):
                async with gateway.client() as client:
                    assert (await client.ask(GET)).status == 200
                await gateway.until_idle()
                await gateway.gateway.reload(settings)
        assert len(receiver.spans) == 2
        assert len(other.spans) == 2
        assert _sums(gateway.gateway) == (4, {})


async def test_reload_of_the_sample_keeps_the_exporter(
    traced: Traced, receiver: TraceReceiver
) -> None:
    async with ScriptedServer(GOOD) as server, traced(server.url) as gateway:
        before = gateway.gateway.parts.tracing
        assert before is not None
        assert before.declared is not None
        off = before.declared.model_copy(update={"sample": 0.0})
        settings = gateway.gateway.settings.model_copy(update={"tracing": off})
        changes = await gateway.gateway.reload(settings)
        assert changes == "tracing changed"
        async with gateway.client() as client:
            assert (await client.ask(GET)).status == 200
            assert (await client.ask(_with(SAMPLED))).status == 200
        after = gateway.gateway.parts.tracing
        assert after is not None
        assert after.exporter is before.exporter
    assert {span.trace_id for span in receiver.spans} == {TRACE}


async def test_call_during_a_reload_is_exported(traced: Traced, receiver: TraceReceiver) -> None:
    """Its trace began with the old settings; the receiver is the same."""

    async def late(connection: Any) -> None:
        await connection.request()
        await asyncio.sleep(0.2)
        await connection.send(http_response(b"{}"))

    async with (
        ScriptedServer(late) as server,
        traced(server.url) as gateway,
        gateway.client() as client,
    ):
        await client.send(GET)
        await until(lambda: server.requests)
        tracing = gateway.gateway.settings.tracing
        assert tracing is not None
        settings = gateway.gateway.settings.model_copy(
            update={"tracing": tracing.model_copy(update={"sample": 0.0})}
        )
        await gateway.gateway.reload(settings)
        assert (await client.read_response()).status == 200
    assert len(receiver.spans) == 2
