import asyncio
import gzip
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.destination import Destination
from gateway.upstream.pool.model_discovery import ModelDiscovery
from gateway.upstream.pool.supervisor import PoolSupervisor
from tests.support.doubles.streaming import (
    LIMITS,
    SERVER,
    URL,
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
    ready,
    single_destination,
)
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    json_request,
    metadata,
)

METADATA = ScriptedUpstreamResponse(200, {}, [metadata(-1)])
NO_CONFIG = ScriptedUpstreamResponse(404)
OK = ScriptedUpstreamResponse(200, {}, [b'{"outputs":[]}'])


async def _serve(
    destination: Destination,
    method: str,
    target: str,
    *body: BodyStep,
    headers: dict[str, str] | None = None,
) -> tuple[ScriptedClientResponse, EventLog]:
    log = EventLog()
    response = ScriptedClientResponse(log)
    await handle_request(
        ScriptedRequest(log, method, target, headers, body),
        response,
        single_destination(destination),
    )
    return response, log


@pytest.mark.parametrize(
    ("method", "target", "sent"),
    [
        ("GET", "/v2/models/m/ready", "GET /v2/models/m/ready"),
        ("POST", "/v2/health/live", "POST /v2/health/live"),
        ("GET", "/v2", "GET /v2"),
        ("GET", "/v2/trace", "GET /v2/trace/setting"),
        ("POST", "/v2/models/m/trace", "POST /v2/models/m/trace/setting"),
        ("POST", "/v2/models/m/generate", "POST /v2/models/m/generate"),
        ("GET", INFER, f"GET {INFER}"),
        ("POST", "/v2/repository/models/m/load", "POST /v2/repository/models/m/load"),
        ("POST", "/v2/repository/index", "POST /v2/repository/index"),
        ("GET", "/v2/models/stats?x", "GET /v2/models/stats?x"),
        ("GET", "/v2/logging", "GET /v2/logging"),
        ("PUT", "/v2/logging", "PUT /v2/logging"),
        ("DELETE", "/anything?x", "DELETE /anything?x"),
    ],
)
async def test_each_operation_has_its_handler(method: str, target: str, sent: str) -> None:
    endpoint = ScriptedEndpoint(EventLog(), OK)
    response, _ = await _serve(make_destination(endpoint), method, target)
    assert response.status == 200
    assert [f"{r.method} {r.target}" for r in endpoint.requests] == [sent]


@pytest.mark.parametrize("kind", list(ErrorKind))
async def test_gateway_error_becomes_an_error_response(kind: ErrorKind) -> None:
    endpoint = ScriptedEndpoint(EventLog(), GatewayError(kind, "what “went” wrong"))
    response, log = await _serve(make_destination(endpoint), "GET", "/v2/x")
    assert response.status == kind.value.status
    assert response.body.decode() == '{"error":"what “went” wrong"}'
    accepted = kind is ErrorKind.UNSUPPORTED_ENCODING
    assert dict(response.headers) == {
        "Content-Type": "application/json",
        "Content-Length": str(len(response.body)),
        **({"Accept-Encoding": "gzip, deflate"} if accepted else {}),
    }
    assert log[-1] == "client has got all"


async def test_error_within_a_response_aborts_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    broken = ScriptedUpstreamResponse(200, {}, [b"begun", bad_response(f"{URL} fell\nover")])
    response, log = await _serve(
        make_destination(ScriptedEndpoint(EventLog(), broken)), "GET", "/v2/x"
    )
    assert response.body == b"begun"
    assert log[-1] == "client is cut off"
    assert "client has got all" not in log
    assert caplog.messages == [rf"request -: response aborted: {URL} fell\nover"]


async def test_upstream_error_response_passes_to_the_client() -> None:
    refusal = ScriptedUpstreamResponse(404, {"Content-Type": "text/x"}, [b"no such model"])
    destination = make_destination(ScriptedEndpoint(EventLog(), refusal))
    response, _ = await _serve(destination, "POST", INFER, bytes(4), headers={HEADER_LENGTH: "0"})
    assert (response.status, response.body) == (404, b"no such model")
    assert dict(response.headers) == {"Content-Type": "text/x", "Content-Length": "13"}


async def test_client_disconnect_is_no_error_response() -> None:
    log = EventLog()
    response = ScriptedClientResponse(log, fault=ConnectionResetError())
    request = ScriptedRequest(log, "GET", "/v2/x")
    with pytest.raises(ConnectionResetError):
        await handle_request(
            request, response, single_destination(make_destination(ScriptedEndpoint(log, OK)))
        )
    assert "client is cut off" not in log


SHORT = replace(LIMITS, idle_timeout=0.02)


async def test_client_that_does_not_send_is_a_408() -> None:
    destination = make_destination(ScriptedEndpoint(EventLog()), limits=SHORT)
    response, _ = await _serve(destination, "POST", INFER, b"{", asyncio.Event())
    assert response.status == 408
    assert b"waiting for the client" in response.body


async def test_server_that_does_not_respond_is_a_504() -> None:
    destination = make_destination(ScriptedEndpoint(EventLog(), asyncio.Event()), limits=SHORT)
    response, _ = await _serve(destination, "POST", INFER, json_request())
    assert response.status == 504
    assert SERVER.public.encode() in response.body


async def test_server_that_gives_no_metadata_is_a_504() -> None:
    destination = make_destination(ScriptedEndpoint(EventLog(), asyncio.Event()), limits=SHORT)
    response, _ = await _serve(destination, "POST", INFER, bytes(4), headers={HEADER_LENGTH: "0"})
    await destination.upstream.metadata.close()
    assert response.status == 504
    assert SERVER.public.encode() in response.body


async def test_client_that_stops_streaming_to_a_server_is_a_408() -> None:
    destination = make_destination(ScriptedEndpoint(EventLog()), limits=SHORT)
    chunked = {"Transfer-Encoding": "chunked"}
    response, _ = await _serve(
        destination, "POST", "/v2/x", b"begun", asyncio.Event(), headers=chunked
    )
    assert response.status == 408


async def test_client_that_does_not_read_is_aborted() -> None:
    log = EventLog()
    response = ScriptedClientResponse(log, ready=asyncio.Event())
    request = ScriptedRequest(log, "GET", "/v2/x")
    await handle_request(
        request,
        response,
        single_destination(make_destination(ScriptedEndpoint(log, OK), limits=SHORT)),
    )
    assert log[-1] == "client is cut off"


async def test_client_that_does_not_read_an_error_is_aborted() -> None:
    log = EventLog()
    response = ScriptedClientResponse(log, ready=asyncio.Event())
    refusal = ScriptedEndpoint(log, ScriptedUpstreamResponse(404, {}, [bytes(1000)]))
    request = ScriptedRequest(log, "POST", INFER, {HEADER_LENGTH: "0"}, [bytes(4)])
    await handle_request(
        request, response, single_destination(make_destination(refusal, limits=SHORT))
    )
    assert log[-2:] == ["client gets 404", "client is cut off"]


async def _raw(destination: Destination) -> int:
    response, _ = await _serve(destination, "POST", INFER, bytes(4), headers={HEADER_LENGTH: "0"})
    return response.status


@pytest.mark.parametrize("room", ["/v2/repository", "/v2/repository/r"])
@pytest.mark.parametrize("verb", ["load", "unload"])
@pytest.mark.parametrize("step", [OK, ScriptedUpstreamResponse(400), bad_response("fell over")])
async def test_load_and_unload_drop_cached_metadata(
    room: str, verb: str, step: ScriptedUpstreamResponse | GatewayError
) -> None:
    """Whatever the status of the server."""
    endpoint = ScriptedEndpoint(
        EventLog(), METADATA, NO_CONFIG, OK, OK, step, METADATA, NO_CONFIG, OK
    )
    destination = make_destination(endpoint)
    assert [await _raw(destination), await _raw(destination)] == [200, 200]
    await _serve(destination, "POST", f"{room}/models/m/{verb}")
    assert await _raw(destination) == 200
    targets = [request.target for request in endpoint.requests]
    assert targets.count("/v2/models/m") == 2


async def test_load_of_another_model_keeps_cached_metadata() -> None:
    endpoint = ScriptedEndpoint(EventLog(), METADATA, NO_CONFIG, OK, OK, OK)
    destination = make_destination(endpoint)
    assert await _raw(destination) == 200
    await _serve(destination, "POST", "/v2/repository/models/m2/load")
    assert await _raw(destination) == 200
    assert len(endpoint.requests) == 5


BINARY = {HEADER_LENGTH: str(len(binary_header(8)))}


@pytest.mark.parametrize(
    ("method", "target", "body", "headers"),
    [
        ("GET", "/v2/models/m", b"", {}),
        ("GET", "/v2/models/m/versions/1/ready", b"", {}),
        ("POST", INFER, json_request(), {}),
        ("POST", INFER, binary_header(8) + bytes(8), BINARY),
        ("POST", INFER, bytes(4), {HEADER_LENGTH: "0"}),
        ("POST", INFER, gzip.compress(json_request()), {"Content-Encoding": "gzip"}),
        ("POST", "/v2/models/m/generate", gzip.compress(b"{}"), {"Content-Encoding": "gzip"}),
    ],
)
async def test_call_for_a_model_goes_to_an_endpoint_that_has_it(
    method: str, target: str, body: bytes, headers: dict[str, str]
) -> None:
    await _goes_to_the_second(("n", "m", "o"), method, target, body, headers)


@pytest.mark.parametrize(
    ("method", "what", "body", "headers"),
    [
        ("POST", "/infer", json_request(), {}),
        ("POST", "/infer", bytes(4), {HEADER_LENGTH: "0"}),
        ("GET", "/ready", b"", {}),
        ("POST", "/generate", b"{}", {}),
    ],
)
async def test_call_for_a_version_goes_to_an_endpoint_that_has_it(
    method: str, what: str, body: bytes, headers: dict[str, str]
) -> None:
    models = ("m/1", "m/2", "m/3")
    await _goes_to_the_second(models, method, f"/v2/models/m/versions/2{what}", body, headers)


async def _goes_to_the_second(
    models: Sequence[str], method: str, target: str, body: bytes, headers: dict[str, str]
) -> None:
    """Check that requests reach only the one of three endpoints that has the model."""
    responses = [METADATA, NO_CONFIG] if headers.get(HEADER_LENGTH) == "0" else []
    endpoints = [
        ScriptedEndpoint(EventLog(), *responses, *[OK] * 3, url=f"http://{i}") for i in range(3)
    ]
    destination = make_destination(
        *endpoints, supervisor=PoolSupervisor(model_discovery=ModelDiscovery(60))
    )
    for member, model in zip(destination.upstream.pool.members, models, strict=True):
        member.models = ready(model)
    steps = (body,) if body else ()
    for _ in range(3):
        response, _ = await _serve(destination, method, target, *steps, headers=headers)
        assert response.status == 200
    assert not endpoints[0].requests
    assert not endpoints[2].requests


@pytest.mark.parametrize("step", [OK, ScriptedUpstreamResponse(400), bad_response("fell over")])
async def test_load_and_unload_refresh_the_model_discovery(
    step: ScriptedUpstreamResponse | GatewayError,
) -> None:
    asked: list[str] = []

    class Noting(ModelDiscovery):
        def refresh_models(self) -> None:
            asked.append("again")

    destination = make_destination(
        ScriptedEndpoint(EventLog(), step, OK),
        supervisor=PoolSupervisor(model_discovery=Noting(60)),
    )
    await _serve(destination, "POST", "/v2/repository/models/m/load")
    assert asked == ["again"]
    await _serve(destination, "GET", "/v2/models/m")
    assert asked == ["again"]


@pytest.mark.parametrize("target", [INFER, "/v1/models/m:predict", "/v2/models/m/generate"])
async def test_body_is_not_read_if_the_upstream_has_no_endpoint(target: str) -> None:
    response, log = await _serve(make_destination(), "POST", target, json_request())
    assert response.status == 503
    assert b"the upstream has no endpoint" in response.body
    assert log.count_of("client sends") == 0


async def test_requests_of_the_gateway_itself_take_no_slots() -> None:
    limit = ConcurrencyLimit("the gateway", 1, 0, 1.0)
    endpoint = ScriptedEndpoint(EventLog(), METADATA, NO_CONFIG, OK)
    destination = replace(make_destination(endpoint), concurrency_limits=(limit,))
    response, _ = await _serve(destination, "POST", INFER, bytes(4), headers={HEADER_LENGTH: "0"})
    assert response.status == 200
    assert len(endpoint.requests) == 3
    assert limit.active == 0
