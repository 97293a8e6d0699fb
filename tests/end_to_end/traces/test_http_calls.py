"""The spans of a call over HTTP nest, and the server's span can join them."""

from __future__ import annotations

from tests.end_to_end.observe.conftest import Way
from tests.end_to_end.observe.conftest import way as way
from tests.end_to_end.traces.conftest import PARENT, SAMPLED, TRACE, Traced, parent_of
from tests.support.inference_messages import FLOATS, binary_response, infer_json
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.support.servers.trace_receiver import TraceReceiver

STATE = {"tracestate": "vendor=a1,other=b"}


async def test_spans_of_a_conversion_nest_and_join(
    way: Way, traced: Traced, receiver: TraceReceiver
) -> None:
    async with ScriptedServer(always_respond(binary_response(FLOATS.tobytes()))) as server:
        async with traced(server.url) as gateway, gateway.client() as client:
            await client.send(way(infer_json(headers={**SAMPLED, **STATE})))
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
