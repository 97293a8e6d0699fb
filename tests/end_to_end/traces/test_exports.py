"""Sampling, receivers that fail, reloads and stops: no call is touched, and drops are counted."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest

from gateway.app.gateway import Gateway
from gateway.observe.gateway_metrics import DROPPED_SPANS, EXPORTED_SPANS
from gateway.settings.schema import Settings
from tests.end_to_end.traces.conftest import SAMPLED, TRACE, Traced
from tests.support.http_messages import http_response, request
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.support.servers.trace_receiver import TraceReceiver, trace_receiver

GET = request("GET", "/v2/models/m")
GOOD = always_respond(http_response(b"{}"))


def _sums(gateway: Gateway) -> tuple[float, dict[str, float]]:
    """Return the spans that were exported, and those that were dropped by their reason."""
    store = gateway.metric_store
    dropped = {reason: count for (reason,), (count,) in store.sums(DROPPED_SPANS).items() if count}
    return store.sums(EXPORTED_SPANS)[()][0], dropped


@pytest.mark.parametrize("sample", ["0%", "100%"])
async def test_caller_without_a_trace_is_sampled_by_the_ratio(
    sample: str, path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with ScriptedServer(GOOD) as server:
        async with traced(server.url, sample=sample) as gateway, gateway.client() as client:
            assert (await client.ask(path(GET))).status == 200
        parent = server.requests[0].head.get("traceparent")
        exemplars = [each[1] for each in gateway.gateway.call_metrics.exemplars()]
    if sample == "0%":
        assert (parent, receiver.spans, exemplars) == (None, [], [])
    else:
        (attempt,) = receiver.attempts()
        assert parent == f"00-{attempt.trace_id}-{attempt.span_id}-01"
        assert receiver.call().parent_id == ""
        assert receiver.call().holds(attempt)
        assert exemplars == [attempt.trace_id]


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
            assert (await client.ask(request("GET", "/v2/models/m", headers=SAMPLED))).status == 200
        after = gateway.gateway.parts.tracing
        assert after is not None
        assert after.exporter is before.exporter
    assert {span.trace_id for span in receiver.spans} == {TRACE}
