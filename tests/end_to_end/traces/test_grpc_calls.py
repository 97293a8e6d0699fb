"""Calls over gRPC and HTTP/2 are traced as those over HTTP/1.1 are, whatever the server speaks."""

from __future__ import annotations

import grpc
import pytest

from tests.end_to_end.traces.conftest import PARENT, SAMPLED, TRACE, Traced, parent_of
from tests.support.grpc.client import SERVICE, grpc_client
from tests.support.grpc.infer_messages import infer_request
from tests.support.http2_client import connect_http2
from tests.support.http_messages import http_response
from tests.support.inference_messages import FLOATS, binary_response, infer_json, json_request
from tests.support.servers.grpc_server import GrpcServer, fail, grpc_server
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.support.servers.trace_receiver import TraceReceiver

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


async def test_messages_of_a_stream_are_attempts(traced: Traced, receiver: TraceReceiver) -> None:
    async with ScriptedServer(always_respond(binary_response(FLOATS.tobytes()))) as server:
        async with traced(server.url) as gateway, grpc_client(gateway.url) as client:
            response = await client.call(
                "ModelStreamInfer", *[infer_request()] * 40, metadata=METADATA
            )
            assert len(response.messages) == 40
        heads = [each.head for each in server.requests if each.head.target.endswith("/infer")]
    parents = [parent_of(head)[1] for head in heads]
    assert len(set(parents)) == 40
    assert [each.span_id for each in receiver.attempts()] == parents[:32]
    assert all(receiver.call().holds(each) for each in receiver.attempts())


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
