from __future__ import annotations

import json

import pytest

from gateway.protocol.dialects import KSERVE
from gateway.protocol.operations import OPERATION_KINDS
from gateway.proxy.cluster.scatter_gather import FAILED_ENDPOINTS
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from tests.support.doubles.cluster import (
    A,
    ServerStep,
    UndetectedDialectState,
    connect_error,
    one_upstream,
    scripted_response,
    send_request,
    servers,
    upstreams_of,
)
from tests.support.doubles.streaming import ScriptedClientResponse, make_destination, ready

MODEL = "/v1/models/m"
MODELS = "/v1/models"
READY = "GET /v2/models/m/ready"
INDEX = "POST /v2/repository/index"


def _error(response: ScriptedClientResponse) -> str:
    return str(json.loads(response.body)["error"])


@pytest.mark.parametrize("body", [b"", b'{"name":"m","ready":true}'])
async def test_ready_model_is_reported(body: bytes) -> None:
    cluster = one_upstream(a=(scripted_response(body), scripted_response(body)))
    response = await cluster.ask("GET", MODEL)
    assert (response.status, response.body) == (200, b'{"name":"m","ready":true}')
    assert response.headers["Content-Type"] == "application/json"
    assert (await cluster.ask("GET", MODEL + "/versions/2")).status == 200
    assert cluster.received == [[READY, "GET /v2/models/m/versions/2/ready"]]


@pytest.mark.parametrize(
    "step", [scripted_response(b"", 400), scripted_response(b'{"ready":false}')]
)
async def test_model_that_is_not_ready_is_a_503(step: ServerStep) -> None:
    cluster = one_upstream(a=(step, scripted_response(b'{"name":"m"}')))
    response = await cluster.ask("GET", MODEL)
    assert (response.status, response.body) == (503, b'{"error":"model \'m\' is not ready"}')
    assert cluster.received == [[READY, "GET /v2/models/m"]]


@pytest.mark.parametrize(
    ("body", "told"), [(b'{"detail":"unknown"}', "unknown"), (b"", "Scripted")]
)
async def test_unknown_model_passes_the_server_error(body: bytes, told: str) -> None:
    cluster = one_upstream(a=(scripted_response(b"", 400), scripted_response(body, 404)))
    response = await cluster.ask("GET", MODEL)
    assert (response.status, _error(response)) == (404, told)


async def test_endpoint_that_has_the_model_is_asked() -> None:
    responses = (scripted_response(b""),) * 3
    cluster = one_upstream(discovers_models=True, a=responses, b=responses)
    for member, model in zip(cluster.destinations[0].upstream.pool.members, "nm", strict=True):
        member.models = ready(model)
    for _ in range(3):
        assert (await cluster.ask("GET", MODEL)).status == 200
    assert cluster.received == [[], [READY] * 3]


async def test_unreachable_server_is_a_503() -> None:
    response = await one_upstream(a=connect_error(A)).ask("GET", MODEL)
    assert response.status == 503
    assert "upstream 'a'" in _error(response)


async def test_v1_server_gets_the_request_unchanged_but_no_version() -> None:
    cluster = one_upstream(dialect=KSERVE, a=scripted_response(b'{"name":"m","ready":"True"}'))
    assert (await cluster.ask("GET", MODEL)).body == b'{"name":"m","ready":"True"}'
    response = await cluster.ask("GET", MODEL + "/versions/1")
    assert response.status == 501
    assert f"does not support model versions; use {MODEL}" in _error(response)
    assert cluster.received == [["GET " + MODEL]]


async def test_list_has_the_models_of_one_server() -> None:
    index = [{"name": "b", "state": "READY"}, {"name": "a", "state": "UNAVAILABLE"}, {"name": "c"}]
    cluster = one_upstream(a=scripted_response(json.dumps(index).encode()))
    response = await cluster.ask("GET", MODELS)
    assert (response.status, response.body) == (200, b'{"models":["b","c"]}')
    assert cluster.received == [[INDEX]]
    assert cluster.endpoints[0].bodies == [b'{"ready":true}']


async def test_list_has_the_models_of_all_upstreams() -> None:
    index = b'[{"name":"x","version":"1"},{"name":"x","version":"2"},{"name":"y"}]'
    cluster = upstreams_of(
        a=scripted_response(index),
        b=scripted_response(b'{"models":["y","z"]}'),
        c=scripted_response(b"[]"),
        dialects={"b": KSERVE},
    )
    response = await cluster.ask("GET", MODELS)
    assert response.status == 200
    assert sorted(json.loads(response.body)["models"]) == ["x", "y", "z"]
    assert cluster.received == [[INDEX], ["GET " + MODELS], [INDEX]]


async def test_list_omits_the_models_of_a_rule_that_denies_it() -> None:
    a, b = servers(a=scripted_response(b'[{"name":"x"}]'), b=())
    denied = Route(
        Match(), (make_destination(b, name="b"),), denied_kinds=OPERATION_KINDS["repository"]
    )
    router = Router([Route(Match(), (make_destination(a, name="a"),)), denied])
    response = await send_request(router, "GET", MODELS)
    assert json.loads(response.body) == {"models": ["x"]}
    assert (await send_request(Router([denied]), "GET", MODELS)).status == 403
    assert b.requests == []


OF_OPENAI = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 501])
async def test_server_without_an_index_gets_the_request_unchanged(status: int) -> None:
    cluster = one_upstream(
        a=(scripted_response(b"no", status), scripted_response(OF_OPENAI, 404, {"X": "1"}))
    )
    response = await cluster.ask("GET", MODELS + "?x=1", headers={"Y": "2"})
    assert (response.status, response.body, response.headers["X"]) == (404, OF_OPENAI, "1")
    assert cluster.received == [[INDEX, "GET " + MODELS + "?x=1"]]
    (endpoint,) = cluster.endpoints
    assert endpoint.requests[-1].headers["Y"] == "2"
    assert endpoint.bodies[-1] == b""


@pytest.mark.parametrize("status", [408, 429, 500])
async def test_failing_index_is_still_an_index(status: int) -> None:
    cluster = one_upstream(a=scripted_response(b"not now", status))
    response = await cluster.ask("GET", MODELS)
    assert (response.status, response.body) == (status, b'{"error":"not now"}')
    assert cluster.received == [[INDEX]]


async def test_other_kind_of_list_comes_from_one_endpoint() -> None:
    cluster = one_upstream(a=scripted_response(b"", 404), b=scripted_response(OF_OPENAI))
    assert (await cluster.ask("GET", MODELS)).body == OF_OPENAI
    assert cluster.received == [[INDEX], ["GET " + MODELS]]  # one after the other


async def test_list_of_several_upstreams_is_never_that_of_one() -> None:
    cluster = upstreams_of(a=scripted_response(b"none", 404), b=scripted_response(b"none", 404))
    response = await cluster.ask("GET", MODELS)
    assert (response.status, response.body) == (404, b'{"error":"none"}')
    assert FAILED_ENDPOINTS not in response.headers
    assert cluster.received == [[INDEX], [INDEX]]


@pytest.mark.parametrize("body", [b"no", b"5", b'{"models":5}', b"[1]"])
async def test_invalid_list_is_a_502(body: bytes) -> None:
    response = await one_upstream(a=scripted_response(body)).ask("GET", MODELS)
    assert response.status == 502
    assert "sent no list of models" in _error(response)


@pytest.mark.parametrize(("target", "question"), [(MODEL, []), (MODELS, [INDEX])])
async def test_server_of_unknown_dialect_that_is_down_is_a_503(
    target: str, question: list[str]
) -> None:
    state = UndetectedDialectState(KSERVE, connect_error(A))
    cluster = one_upstream(dialect=state, a=connect_error(A))
    response = await cluster.ask("GET", target)
    assert response.status == 503
    assert "cannot connect to upstream 'a'" in _error(response)
    assert cluster.received == [question]
