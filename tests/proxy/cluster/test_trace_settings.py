import logging

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, TRITON, Dialect
from gateway.protocol.operations import parse_operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.cluster.server_settings import trace_settings
from gateway.proxy.destination import Upstream
from gateway.proxy.interfaces import Call
from tests.support.doubles.streaming import (
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
)


async def _sent(method: str, target: str, body: bytes = b"") -> tuple[str, bytes]:
    """Send a trace call; return the target and the body that the server got."""
    log = EventLog()
    endpoint = ScriptedEndpoint(log, ScriptedUpstreamResponse(200, {}, [b"{}"]))
    request = ScriptedRequest(log, method, target, body=[body] if body else [])
    response = ScriptedClientResponse(log)
    with Deadline(9, 9) as deadline:
        operation = parse_operation(method, target)
        destination = make_destination(endpoint)
        upstreams = (destination.upstream,)
        call = Call(request, response, operation, destination, deadline, upstreams)
        await trace_settings(call)
    assert (response.status, response.body) == (200, b"{}")
    return endpoint.requests[0].target, endpoint.bodies[0]


@pytest.mark.parametrize("spelling", ["/trace", "/trace/setting"])
@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ("/v2", "/v2"),
        ("/v2/models/m", "/v2/models/m"),
        ("/v2/models/m/versions/1", "/v2/models/m"),
    ],
)
async def test_trace_path_is_that_of_the_server(spelling: str, asked: str, sent: str) -> None:
    assert await _sent("GET", asked + spelling) == (f"{sent}/trace/setting", b"")
    assert await _sent("POST", asked + spelling, b"{}") == (f"{sent}/trace/setting", b"{}")


@pytest.mark.parametrize("query", ["?", "?a=b", "?a?b"])
async def test_query_is_kept(query: str) -> None:
    assert (await _sent("GET", "/v2/trace" + query))[0] == "/v2/trace/setting" + query


async def test_version_that_the_server_ignores_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    await _sent("GET", "/v2/models/m/trace")
    assert not caplog.messages
    await _sent("GET", "/v2/models/m/versions/7/trace")
    (message,) = caplog.messages
    assert "version 7 of model m" in message
    assert "triton" in message


@pytest.mark.parametrize("dialect", [KSERVE, OPENVINO, JSON], ids=lambda each: each.name)
@pytest.mark.parametrize("target", ["/v2/trace", "/v2/models/m/trace/setting"])
async def test_server_without_trace_settings_gets_no_request(dialect: Dialect, target: str) -> None:
    log = EventLog()
    endpoint = ScriptedEndpoint(log, ScriptedUpstreamResponse(200, {}, [b"{}"]))
    destination = make_destination(endpoint, name="models", dialect=dialect)
    request, operation = ScriptedRequest(log, "GET", target), parse_operation("GET", target)
    with Deadline(9, 9) as deadline:
        response, upstreams = ScriptedClientResponse(log), (destination.upstream,)
        call = Call(request, response, operation, destination, deadline, upstreams)
        with pytest.raises(GatewayError) as caught:
            await trace_settings(call)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert f"upstream 'models' ({dialect.name}) lacks the trace extension" in caught.value.message
    assert not endpoint.requests


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_upstreams_without_trace_settings_are_named(method: str) -> None:
    """No server is queried: a change would reach only some of them."""
    log = EventLog()
    endpoints = [ScriptedEndpoint(log, url=f"http://{name}:1") for name in "abc"]

    def upstream(number: int, dialect: Dialect) -> Upstream:
        return make_destination(endpoints[number], name="abc"[number], dialect=dialect).upstream

    upstreams = (upstream(0, KSERVE), upstream(1, TRITON), upstream(2, JSON))
    destination = make_destination(endpoints[1])
    request = ScriptedRequest(log, method, "/v2/trace", body=[b"{}"] if method == "POST" else [])
    operation = parse_operation(method, "/v2/trace")
    with Deadline(9, 9) as deadline:
        response = ScriptedClientResponse(log)
        call = Call(request, response, operation, destination, deadline, upstreams)
        with pytest.raises(GatewayError) as caught:
            await trace_settings(call)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    lacking = "upstream 'a' (kserve) and upstream 'c' (json) lack the trace extension"
    assert caught.value.message == lacking
    assert not log.count_of("server is asked")
