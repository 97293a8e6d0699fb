"""The spans of a call over HTTP nest, and the server's span can join them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.end_to_end.traces.conftest import PARENT, SAMPLED, TRACE, Traced, parent_of
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import (
    FLOATS,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
)
from tests.support.servers.model_scripts import model_script
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.support.servers.trace_receiver import TraceReceiver

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
