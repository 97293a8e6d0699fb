import asyncio
import gzip
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.calls.planner import Planner
from gateway.upstream.pool.checks import ModelDiscovery, PoolSupervisor
from tests.support.doubles.cluster import one_upstream, send_request
from tests.support.doubles.streaming import (
    LIMITS,
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
RAW = {HEADER_LENGTH: "0"}


@pytest.mark.parametrize("kind", list(ErrorKind))
async def test_gateway_error_becomes_an_error_response(kind: ErrorKind) -> None:
    cluster = one_upstream(a=GatewayError(kind, "what “went” wrong"))
    response = await cluster.ask("GET", "/v2/x")
    assert response.status == kind.value.status
    assert response.body.decode() == '{"error":"what “went” wrong"}'
    accepted = kind is ErrorKind.UNSUPPORTED_ENCODING
    assert dict(response.headers) == {
        "Content-Type": "application/json",
        "Content-Length": str(len(response.body)),
        **({"Accept-Encoding": "gzip, deflate"} if accepted else {}),
    }
    assert cluster.log[-1] == "client has got all"


async def test_client_that_does_not_read_an_error_is_aborted() -> None:
    limits = replace(LIMITS, idle_timeout=0.02)
    cluster = one_upstream(limits=limits, a=ScriptedUpstreamResponse(404, {}, [bytes(1000)]))
    response = ScriptedClientResponse(cluster.log, ready=asyncio.Event())
    request = ScriptedRequest(cluster.log, "POST", INFER, RAW, [bytes(4)])
    await handle_request(request, response, Planner(cluster.router))
    assert cluster.log[-2:] == ["client gets 404", "client is cut off"]


VERSION = "/v2/models/m/versions/2"


@pytest.mark.parametrize("models", [("n", "m", "o"), ("m/1", "m/2", "m/3")])
@pytest.mark.parametrize(
    ("method", "target", "body", "headers"),
    [
        ("GET", VERSION, b"", {}),
        ("POST", VERSION + "/infer", json_request(), {}),
        (
            "POST",
            VERSION + "/infer",
            binary_header(8) + bytes(8),
            {HEADER_LENGTH: str(len(binary_header(8)))},
        ),
        ("POST", VERSION + "/infer", bytes(4), RAW),
        ("POST", VERSION + "/generate", gzip.compress(b"{}"), {"Content-Encoding": "gzip"}),
    ],
)
async def test_call_for_a_model_goes_to_an_endpoint_that_has_it(
    models: Sequence[str], method: str, target: str, body: bytes, headers: dict[str, str]
) -> None:
    responses = (METADATA, NO_CONFIG, *[OK] * 3) if headers == RAW else (OK,) * 3
    turns: dict[str, Any] = dict.fromkeys("abc", responses)
    cluster = one_upstream(discovers_models=True, **turns)
    members = cluster.destinations[0].upstream.pool.members
    for member, model in zip(members, models, strict=True):
        member.models = ready(model)
    for _ in range(3):
        steps = (body,) if body else ()
        assert (await cluster.ask(method, target, *steps, headers=headers)).status == 200
    assert [bool(each) for each in cluster.received] == [False, True, False]


async def test_load_and_unload_refresh_the_model_discovery() -> None:
    asked: list[str] = []

    class Noting(ModelDiscovery):
        def refresh_models(self) -> None:
            asked.append("again")

    endpoint = ScriptedEndpoint(EventLog(), ScriptedUpstreamResponse(400), OK)
    router = single_destination(
        make_destination(endpoint, supervisor=PoolSupervisor(model_discovery=Noting(60)))
    )
    for method, target in (("POST", "/v2/repository/models/m/load"), ("GET", "/v2/models/m")):
        await send_request(router, method, target)
        assert asked == ["again"]


@pytest.mark.parametrize("target", [INFER, "/v1/models/m:predict", "/v2/models/m/generate"])
async def test_body_is_not_read_if_the_upstream_has_no_endpoint(target: str) -> None:
    log, router = EventLog(), single_destination(make_destination())
    response = await send_request(router, "POST", target, json_request(), log=log)
    assert response.status == 503
    assert b"the upstream has no endpoint" in response.body
    assert log.count_of("client sends") == 0


async def test_requests_of_the_gateway_itself_take_no_slots() -> None:
    limit = ConcurrencyLimit("the gateway", 1, 0, 1.0)
    endpoint = ScriptedEndpoint(EventLog(), METADATA, NO_CONFIG, OK)
    destination = replace(make_destination(endpoint), concurrency_limits=(limit,))
    router = single_destination(destination)
    assert (await send_request(router, "POST", INFER, bytes(4), headers=RAW)).status == 200
    assert len(endpoint.requests) == 3
    assert limit.active == 0
