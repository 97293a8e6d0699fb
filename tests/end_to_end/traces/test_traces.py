"""Traces of calls: spans, what servers and mirrors get of them, and where they go.

All workers are one for operators: spans and counts survive one that is killed.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.app.gateway import Gateway
from gateway.observe.families import DROPPED_SPANS, EXPORTED_SPANS
from gateway.settings.schema import Settings
from tests.support.addresses import free_address
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.gateway_process import gateway_process, write_settings
from tests.support.grpc.client import SERVICE, grpc_client
from tests.support.grpc.proto_file import infer_request
from tests.support.http2_client import connect_http2
from tests.support.http_messages import Head, http_response, request
from tests.support.inference_messages import (
    FLOATS,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
)
from tests.support.operator import Operator
from tests.support.raw_client import connect
from tests.support.servers.gated_response import GatedResponse
from tests.support.servers.grpc_server import GrpcServer, fail, grpc_server
from tests.support.servers.model_scripts import model_script
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond
from tests.support.servers.trace_receiver import INTERNAL, SERVER, TraceReceiver, trace_receiver

CALL = request("GET", "/v2/models/m/ready")
CONNECTIONS, CALLS = 8, 5
ONCE = CONNECTIONS * CALLS


async def _call_all(url: str) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(url)) for _ in range(CONNECTIONS)]
        for _ in range(CALLS):
            for client in clients:
                assert (await client.ask(CALL)).status == 200


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_spans_and_counts_are_those_of_all_workers(protocol: str, tmp_path: Path) -> None:
    admin = free_address()
    with trace_receiver(protocol) as receiver:
        async with ScriptedServer(always_respond(http_response())) as server:
            tracing = f"{{endpoint: '{receiver.endpoint}', protocol: {protocol}}}"
            more = f"admin: {admin}\nworkers: 2\ntracing: {tracing}\n"
            config = write_settings(tmp_path / "gateway.yaml", server.url, more=more)
            async with gateway_process(config) as (process, url):
                await process.wait_for_output(r"listening on http://\S+ \(admin\)")
                await _call_all(url)
                await until(lambda: len(receiver.spans) == 2 * ONCE)
                operator = Operator(admin)
                await operator.until_counted(ONCE)
                victim = await operator.worker()
                os.kill(victim, signal.SIGKILL)
                await process.wait_for_output(f"worker {victim} was killed by SIGKILL")
                await process.wait_for_output(r"worker \d+ is up")
                await operator.until_counted(ONCE)
                await _call_all(url)
                await operator.until_counted(2 * ONCE)
                async with connect(f"http://{admin}") as client:
                    page = (await client.call("GET", "/metrics")).body.decode()
                process.process.send_signal(signal.SIGTERM)
                status, _, err = await process.end()
    assert status == 0
    assert "Traceback" not in err
    assert len([each for each in receiver.spans if each.kind == SERVER]) == 2 * ONCE
    assert len({each.resource["service.instance.id"] for each in receiver.spans}) == 3
    exported = re.search(r"^tensorgate_trace_spans_exported_total (\d+)", page, re.MULTILINE)
    assert exported is not None
    assert int(exported[1]) >= 2 * ONCE


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}

Traced = Callable[..., AbstractAsyncContextManager[RunningGateway]]


def parent_of(head: Head) -> tuple[str, str, str]:
    """Return trace id, span id and flags of the traceparent that a server got."""
    value = head.get("traceparent")
    assert value is not None
    version, trace_id, span_id, flags = value.split("-")
    assert version == "00"
    return trace_id, span_id, flags


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    """A receiver over HTTP."""
    with trace_receiver() as running:
        yield running


@pytest.fixture
def traced(receiver: TraceReceiver) -> Traced:
    """Return what runs a gateway that traces; all is exported when it has stopped."""

    @asynccontextmanager
    async def run(
        *urls: str, sample: str = "100%", **settings: Any
    ) -> AsyncIterator[RunningGateway]:
        general = {
            "tracing": {**receiver.settings, "sample": sample},
            **settings.pop("general", {}),
        }
        async with running_gateway(*urls, general=general, **settings) as gateway:
            yield gateway

    return run


REQUEST_ID = {"X-Request-Id": "r"}
FORMS = {
    "JSON": infer_json(),
    "binary": infer_binary(binary_header(4 * FLOATS.size), FLOATS.tobytes()),
    "raw binary": infer_raw(FLOATS.tobytes()),
    "V1": request("POST", "/v1/models/m:predict", b'{"instances": [1.0, 2.0, 3.0]}', REQUEST_ID),
    "generate": request("POST", "/v2/models/m/generate", b'{"text_input": "a"}'),
    "metadata": request("GET", "/v2/models/m"),
    "no such model": request("GET", "/v2/models/m/nothing"),
    "not JSON": infer_json(b"{"),
}
MODEL = model_script(other=http_response(b'{"text_output": "a"}'))
STATE = {"tracestate": "vendor=a1,other=b"}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
async def test_traced_call_differs_in_its_trace_alone(
    data: bytes,
    path: Callable[[bytes], bytes],
    traced: Traced,
    receiver: TraceReceiver,
    one_identity: None,
) -> None:
    seen = []
    for sample in ("0%", "100%"):
        async with ScriptedServer(
            model_script(other=http_response(b'{"text_output": "a"}'))
        ) as server:
            async with traced(server.url, sample=sample) as gateway, gateway.client() as client:
                response = await client.ask(path(data))
            heads = [each.head for each in server.requests]
            bodies = [each.body for each in server.requests]
        varying = ("x-request-id", "traceparent", "date", "host")
        lines = [sorted(line for line in head.headers if line[0] not in varying) for head in heads]
        answer = [line for line in response.head.headers if line[0] not in varying]
        seen.append((lines, bodies, response.status, answer, response.body))
    assert seen[0] == seen[1]
    assert all(receiver.call().holds(attempt) for attempt in receiver.attempts())
    assert len(receiver.attempts()) == (0 if data == FORMS["not JSON"] else 1)


async def test_spans_of_a_conversion_nest_and_join(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with ScriptedServer(always_respond(binary_response(FLOATS.tobytes()))) as server:
        async with traced(server.url) as gateway, gateway.client() as client:
            await client.send(path(infer_json(headers={**SAMPLED, **STATE})))
            assert (await client.read_response()).status == 200
        (received,) = server.requests
    call, (attempt,) = receiver.call(), receiver.attempts()
    assert (call.trace_id, call.parent_id, call.state) == (TRACE, PARENT, STATE["tracestate"])
    assert parent_of(received.head) == (TRACE, attempt.span_id, "01")
    assert received.head.get("tracestate") == STATE["tracestate"]
    request_span = receiver.named("convert request")
    response_span = receiver.named("convert response")
    for each in (attempt, request_span, response_span):
        assert call.holds(each)
    assert request_span.end <= attempt.start
    assert len(receiver.spans) == 4
    assert not call.error


METADATA = (*SAMPLED.items(), ("tracestate", "a=1"))
RPC = f"{SERVICE}/ModelInfer"
LONG = ("x-long", "l" * 3000)
"""Has a call take the streaming path."""


def _sent(server: GrpcServer) -> list[dict[str, str]]:
    """Return the metadata of infer calls."""
    pairs = zip(server.paths, server.metadata, strict=True)
    return [dict(metadata) for path, metadata in pairs if path.endswith("Infer")]


on_both_paths = pytest.mark.parametrize("more", [(), (LONG,)], ids=["fast path", "streaming path"])


@on_both_paths
@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.INTERNAL])
async def test_grpc_call_to_a_grpc_server(
    code: grpc.StatusCode,
    more: tuple[tuple[str, str], ...],
    traced: Traced,
    receiver: TraceReceiver,
) -> None:
    failing = {} if code is grpc.StatusCode.OK else {"ModelInfer": fail(code, "boom")}
    with grpc_server(unary=failing) as server:
        async with traced(server.url) as gateway, grpc_client(gateway.url) as client:
            for _ in range(2):  # the second one finds a connection
                response = await client.call(
                    "ModelInfer", infer_request(), metadata=(*METADATA, *more)
                )
                assert response.code is code
    sent = _sent(server)
    assert len({each["traceparent"] for each in sent}) == len(receiver.attempts()) == 2
    for number in range(2):
        call, attempt = receiver.call(number), receiver.attempts()[number]
        assert call.holds(attempt)
        assert sent[number]["traceparent"] == f"00-{TRACE}-{attempt.span_id}-01"
        assert sent[number]["tracestate"] == "a=1"
        for each in (call, attempt):
            assert each.name == each.attributes["rpc.method"] == RPC
            assert each.attributes["rpc.response.status_code"] == code.name
            assert each.error is bool(failing)
            assert each.attributes.get("error.type") == ("INTERNAL" if failing else None)


async def test_http_call_to_a_grpc_server(traced: Traced, receiver: TraceReceiver) -> None:
    with grpc_server() as server:
        async with traced(server.url) as gateway, gateway.client() as client:
            data = infer_json(json_request(1.0), headers=dict(METADATA))
            assert (await client.ask(data)).status == 200
    call, (attempt,), (sent,) = receiver.call(), receiver.attempts(), _sent(server)
    assert (call.trace_id, call.parent_id, call.state) == (TRACE, PARENT, "a=1")
    assert sent["traceparent"] == f"00-{TRACE}-{attempt.span_id}-01"
    assert sent["tracestate"] == "a=1"
    assert call.holds(attempt)
    assert (call.name, attempt.name) == ("POST /v2/models/{model}/infer", RPC)
    assert receiver.named("convert request").parent_id == receiver.call().span_id


async def test_grpc_call_to_an_http_server(traced: Traced, receiver: TraceReceiver) -> None:
    async with ScriptedServer(always_respond(binary_response(FLOATS.tobytes()))) as server:
        async with traced(server.url) as gateway, grpc_client(gateway.url) as client:
            response = await client.call("ModelInfer", infer_request(), metadata=METADATA)
            assert response.code is grpc.StatusCode.OK
        heads = [each.head for each in server.requests if each.head.target.endswith("/infer")]
    (attempt,) = receiver.attempts()
    assert [parent_of(head) for head in heads] == [(TRACE, attempt.span_id, "01")]
    assert heads[0].get("tracestate") == "a=1"
    assert receiver.call().name == RPC
    assert receiver.call().holds(attempt)
    assert attempt.attributes["http.response.status_code"] == 200


@on_both_paths
async def test_call_over_http2(
    more: tuple[tuple[str, str], ...], traced: Traced, receiver: TraceReceiver
) -> None:
    async with ScriptedServer(always_respond(http_response(b"{}"))) as server:
        async with traced(server.url) as gateway, connect_http2(gateway.url) as client:
            reply = await client.call("GET", "/v2/models/m", headers=[*METADATA, *more])
            assert reply.status == 200
        (received,) = server.requests
    call, (attempt,) = receiver.call(), receiver.attempts()
    assert parent_of(received.head) == (TRACE, attempt.span_id, "01")
    assert call.holds(attempt)
    assert call.parent_id == PARENT
    assert call.attributes["network.protocol.version"] == "2"
    assert call.attributes["http.route"] == "/v2/models/{model}"


GET = request("GET", "/v2/models/m", headers=SAMPLED)
TRACED_INFER = infer_json(headers={**SAMPLED, "tracestate": "a=1"})
RESPONSE = binary_response(FLOATS.tobytes())
ROUND_ROBIN = {"load_balancing": {"policy": "round_robin"}}


async def _close(connection: Connection) -> None:
    await connection.request()


async def _hang(connection: Connection) -> None:
    await connection.request()
    await connection.wait_for_close()


BUSY = always_respond(http_response(b"{}", status="503 Busy"))


@pytest.mark.parametrize(
    ("failure", "error_type"), [(BUSY, "503"), (_close, "no_response"), (None, "unreachable")]
)
async def test_each_attempt_has_a_span_of_its_own(
    failure: Script | None,
    error_type: str,
    path: Callable[[bytes], bytes],
    traced: Traced,
    receiver: TraceReceiver,
) -> None:
    route = {"retry_on": [503, "no_response"]}
    async with (
        ScriptedServer(failure or BUSY) as bad,
        ScriptedServer(always_respond(RESPONSE)) as good,
    ):
        bad_url = bad.url if failure else f"http://{free_address()}"
        async with (
            traced(bad_url, good.url, upstream=ROUND_ROBIN, route=route) as gateway,
            gateway.client() as client,
        ):
            for _ in range(2):
                assert (await client.ask(path(TRACED_INFER))).status == 200
        heads = [each.head for server in (bad, good) for each in server.requests]
    attempts = receiver.attempts()
    failed = [each for each in attempts if each.error]
    arrived = [each for each in attempts if not each.error or failure]
    assert sorted(parent_of(head)[1] for head in heads) == sorted(each.span_id for each in arrived)
    assert all(head.get("tracestate") == "a=1" for head in heads)
    assert {each.attributes["error.type"] for each in failed} == {error_type}
    assert all(each.attributes["url.full"].startswith(bad_url) for each in failed)
    calls = [receiver.call(number) for number in range(2)]
    for call in calls:
        assert (call.trace_id, call.parent_id, call.error) == (TRACE, PARENT, False)
    for attempt in attempts:
        assert sum(call.holds(attempt) for call in calls) == 1
    retried = [each for each in attempts if "http.request.resend_count" in each.attributes]
    assert {each.parent_id for each in retried} == {each.parent_id for each in failed}


def _mirroring(
    traced: Traced, server: ScriptedServer, shadow: ScriptedServer
) -> AbstractAsyncContextManager[RunningGateway]:
    """Run a gateway that sends a copy of each call to a second server."""
    return traced(
        server.url,
        route={"mirror": {"upstream": "shadow", "percent": "100%"}},
        others={"shadow": {"endpoints": [shadow.url], "dialect": "triton"}},
    )


async def test_mirrored_copy_is_below_its_call(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with (
        ScriptedServer(always_respond(RESPONSE)) as server,
        ScriptedServer(always_respond(RESPONSE)) as shadow,
    ):
        async with _mirroring(traced, server, shadow) as gateway:
            async with gateway.client() as client:
                assert (await client.ask(path(TRACED_INFER))).status == 200
            await until(lambda: shadow.requests)
            mirror_of_route = gateway.gateway.active_config.router.routes[0].mirror
            assert mirror_of_route is not None
            await until(lambda: not mirror_of_route.in_flight)
        (own,), (copied,) = server.requests, shadow.requests
    mirror = receiver.named("mirror shadow")
    assert mirror.kind == INTERNAL
    assert (mirror.trace_id, mirror.parent_id) == (TRACE, receiver.call().span_id)
    (copy,) = [each for each in receiver.attempts() if mirror.holds(each)]
    assert parent_of(copied.head) == (TRACE, copy.span_id, "01")
    assert copied.head.get("tracestate") == "a=1"
    (sent,) = [each for each in receiver.attempts() if receiver.call().holds(each)]
    assert parent_of(own.head) == (TRACE, sent.span_id, "01")


async def test_call_that_waits_for_a_slot_has_a_span_of_its_queue(
    traced: Traced, receiver: TraceReceiver
) -> None:
    late = GatedResponse(b"{}")
    async with ScriptedServer(late) as server:
        upstream = {"concurrency": {"max_requests": 1, "max_queue": 5}}
        async with (
            traced(server.url, upstream=upstream) as gateway,
            gateway.client() as first,
            gateway.client() as second,
        ):
            await first.send(GET)
            await until(lambda: server.requests)
            await second.send(GET)
            (destination,) = gateway.gateway.active_config.router.routes[0].destinations
            await until(lambda: destination.concurrency_limits[0].queued)
            waited = time.time_ns()
            late.may_respond.set()
            for client in (first, second):
                assert (await client.read_response()).status == 200
    (queue,) = [each for each in receiver.spans if each.name == "queue" and each.end > waited]
    assert queue.start < waited
    (call,) = [each for each in receiver.spans if each.span_id == queue.parent_id]
    (attempt,) = [each for each in receiver.attempts() if each.parent_id == call.span_id]
    assert call.holds(queue)
    assert queue.end <= attempt.start


async def test_client_that_cuts_a_call_off_leaves_its_spans(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with ScriptedServer(_hang) as server, traced(server.url) as gateway:
        async with gateway.client() as client:
            await client.send(path(GET))
            await until(lambda: server.requests)
        await gateway.until_idle()
    call, (attempt,) = receiver.call(), receiver.attempts()
    assert call.holds(attempt)
    for each in (call, attempt):
        assert each.error
        assert each.attributes["error.type"] == "aborted"
        assert "http.response.status_code" not in each.attributes
    assert call.message == "the client closed the connection"


PLAIN = request("GET", "/v2/models/m")
GOOD = always_respond(http_response(b"{}"))


def _sums(gateway: Gateway) -> tuple[float, dict[str, float]]:
    """Return the spans that were exported, and those that were dropped by their reason."""
    store = gateway.shared.metric_store
    dropped = {reason: count for (reason,), (count,) in store.sums(DROPPED_SPANS).items() if count}
    return store.sums(EXPORTED_SPANS)[()][0], dropped


@pytest.mark.parametrize("sample", ["0%", "100%"])
async def test_caller_without_a_trace_is_sampled_by_the_ratio(
    sample: str, path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with ScriptedServer(GOOD) as server:
        async with traced(server.url, sample=sample) as gateway, gateway.client() as client:
            assert (await client.ask(path(PLAIN))).status == 200
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
                    assert (await client.ask(PLAIN)).status == 200
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
            assert (await client.ask(PLAIN)).status == 200
            assert (await client.ask(request("GET", "/v2/models/m", headers=SAMPLED))).status == 200
        after = gateway.gateway.parts.tracing
        assert after is not None
        assert after.exporter is before.exporter
    assert {span.trace_id for span in receiver.spans} == {TRACE}
