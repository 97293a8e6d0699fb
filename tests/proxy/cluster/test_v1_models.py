from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, Dialect
from gateway.protocol.operations import OPERATION_KINDS
from gateway.proxy.cluster.scatter_gather import FAILED_ENDPOINTS
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from tests.support.doubles.cluster import (
    A,
    B,
    ServerStep,
    UndetectedDialectState,
    connect_error,
    received_requests,
    scripted_response,
    send_request,
    servers,
)
from tests.support.doubles.streaming import make_destination, single_destination

MODEL = "/v1/models/m"
MODELS = "/v1/models"
READY = "GET /v2/models/m/ready"
INDEX = "POST /v2/repository/index"


@pytest.mark.parametrize("body", [b"", b'{"name":"m","ready":true}'])
async def test_ready_model_is_reported(body: bytes) -> None:
    (a,) = servers(a=scripted_response(body))
    response = await send_request(single_destination(make_destination(a)), "GET", MODEL)
    assert (response.status, response.body) == (200, b'{"name":"m","ready":true}')
    assert response.headers["Content-Type"] == "application/json"
    assert received_requests(a) == [[READY]]


async def test_ready_version_is_reported() -> None:
    (a,) = servers(a=scripted_response(b""))
    response = await send_request(
        single_destination(make_destination(a)), "GET", MODEL + "/versions/2"
    )
    assert response.status == 200
    assert received_requests(a) == [["GET /v2/models/m/versions/2/ready"]]


@pytest.mark.parametrize(
    "step", [scripted_response(b"", 400), scripted_response(b'{"ready":false}')]
)
async def test_model_that_is_not_ready_is_a_503(step: object) -> None:
    (a,) = servers(a=(step, scripted_response(b'{"name":"m"}')))  # type: ignore[arg-type]
    response = await send_request(single_destination(make_destination(a)), "GET", MODEL)
    assert (response.status, response.body) == (503, b'{"error":"model \'m\' is not ready"}')
    assert received_requests(a) == [[READY, "GET /v2/models/m"]]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error":"unknown"}', b'{"error":"unknown"}'),
        (b'{"detail":"unknown"}', b'{"error":"unknown"}'),
        (b"", b'{"error":"Scripted"}'),
    ],
)
async def test_unknown_model_passes_the_server_error(body: bytes, told: bytes) -> None:
    (a,) = servers(a=(scripted_response(b"", 400), scripted_response(body, 404)))
    response = await send_request(single_destination(make_destination(a)), "GET", MODEL)
    assert (response.status, response.body) == (404, told)


async def test_unreachable_server_is_a_503() -> None:
    (a,) = servers(a=connect_error(A))
    response = await send_request(single_destination(make_destination(a)), "GET", MODEL)
    assert response.status == 503
    assert "upstream 'a'" in json.loads(response.body)["error"]


async def test_v1_server_gets_the_request_unchanged() -> None:
    (a,) = servers(a=scripted_response(b'{"name":"m","ready":"True"}'))
    response = await send_request(
        single_destination(make_destination(a, dialect=KSERVE)), "GET", MODEL
    )
    assert response.body == b'{"name":"m","ready":"True"}'
    assert received_requests(a) == [["GET " + MODEL]]


async def test_version_is_refused_for_a_server_without_versions() -> None:
    (a,) = servers(a=scripted_response(b"{}"))
    response = await send_request(
        single_destination(make_destination(a, dialect=KSERVE)), "GET", MODEL + "/versions/1"
    )
    assert response.status == 501
    assert f"does not support model versions; use {MODEL}" in json.loads(response.body)["error"]
    assert received_requests(a) == [[]]


async def test_list_has_the_models_of_one_server() -> None:
    index = [{"name": "b", "state": "READY"}, {"name": "a", "state": "UNAVAILABLE"}, {"name": "c"}]
    (a,) = servers(a=scripted_response(json.dumps(index).encode()))
    response = await send_request(single_destination(make_destination(a)), "GET", MODELS)
    assert (response.status, response.body) == (200, b'{"models":["b","c"]}')
    assert received_requests(a) == [[INDEX]]
    assert a.bodies == [b'{"ready":true}']


def by_model(*router: object) -> Router:
    return Router([Route(Match(), (destination,)) for destination in router])  # type: ignore[arg-type]


async def test_list_has_the_models_of_all_upstreams() -> None:
    a, b, c = servers(
        a=scripted_response(
            b'[{"name":"x","version":"1"},{"name":"x","version":"2"},{"name":"y"}]'
        ),
        b=scripted_response(b'{"models":["y","z"]}'),
        c=scripted_response(b"[]"),
    )
    router = by_model(
        make_destination(a, name="a"),
        make_destination(b, name="b", dialect=KSERVE),
        make_destination(c, name="c"),
    )
    response = await send_request(router, "GET", MODELS)
    assert response.status == 200
    assert sorted(json.loads(response.body)["models"]) == ["x", "y", "z"]
    assert received_requests(a, b, c) == [[INDEX], ["GET " + MODELS], [INDEX]]


async def test_list_omits_the_models_of_a_rule_that_denies_it() -> None:
    a, b = servers(a=scripted_response(b'[{"name":"x"}]'), b=())
    denied = Route(
        Match(), (make_destination(b, name="b"),), denied_kinds=OPERATION_KINDS["repository"]
    )
    router = Router([Route(Match(), (make_destination(a, name="a"),)), denied])
    response = await send_request(router, "GET", MODELS)
    assert json.loads(response.body) == {"models": ["x"]}
    refused = await send_request(Router([denied]), "GET", MODELS)
    assert refused.status == 403
    assert received_requests(b) == [[]]


async def test_list_without_one_upstream_is_an_error() -> None:
    a, b = servers(a=scripted_response(b"[]"), b=scripted_response(b"no", 500))
    response = await send_request(
        by_model(make_destination(a, name="a"), make_destination(b, name="b")), "GET", MODELS
    )
    assert response.status == 502
    error = json.loads(response.body)["error"]
    assert "upstream 'b' returned 500: no" in error


OF_OPENAI = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 501])
async def test_server_without_an_index_gets_the_request_unchanged(status: int) -> None:
    (a,) = servers(
        a=(scripted_response(b"no", status), scripted_response(OF_OPENAI, headers={"X": "1"}))
    )
    response = await send_request(
        single_destination(make_destination(a)), "GET", MODELS + "?x=1", headers={"Y": "2"}
    )
    assert (response.status, response.body, response.headers["X"]) == (200, OF_OPENAI, "1")
    assert received_requests(a) == [[INDEX, "GET " + MODELS + "?x=1"]]
    assert a.requests[-1].headers["Y"] == "2"
    assert a.bodies[-1] == b""


async def test_server_without_any_list_responds_itself() -> None:
    (a,) = servers(a=(scripted_response(b"", 404), scripted_response(b"<p>not here", 404)))
    response = await send_request(single_destination(make_destination(a)), "GET", MODELS)
    assert (response.status, response.body) == (404, b"<p>not here")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_failing_index_is_still_an_index(status: int) -> None:
    (a,) = servers(a=scripted_response(b"not now", status))
    response = await send_request(single_destination(make_destination(a)), "GET", MODELS)
    assert (response.status, response.body) == (status, b'{"error":"not now"}')
    assert received_requests(a) == [[INDEX]]


async def test_other_kind_of_list_comes_from_one_endpoint() -> None:
    a, b = servers(a=scripted_response(b"", 404), b=scripted_response(OF_OPENAI))
    response = await send_request(single_destination(make_destination(a, b)), "GET", MODELS)
    assert response.body == OF_OPENAI
    assert received_requests(a, b) == [[INDEX], ["GET " + MODELS]]  # one after the other


async def test_list_of_several_upstreams_is_never_that_of_one() -> None:
    a, b = servers(a=scripted_response(b"none", 404), b=scripted_response(b"none", 404))
    router = by_model(make_destination(a, name="a"), make_destination(b, name="b"))
    response = await send_request(router, "GET", MODELS)
    assert (response.status, response.body) == (404, b'{"error":"none"}')
    assert FAILED_ENDPOINTS not in response.headers
    assert received_requests(a, b) == [[INDEX], [INDEX]]


@pytest.mark.parametrize("body", [b"no", b"5", b'{"models":5}', b"[1]"])
async def test_invalid_list_is_a_502(body: bytes) -> None:
    (a,) = servers(a=scripted_response(body))
    response = await send_request(single_destination(make_destination(a)), "GET", MODELS)
    assert response.status == 502
    assert "sent no list of models" in json.loads(response.body)["error"]


LACKING: dict[str, tuple[Dialect, ServerStep, str]] = {
    "no index": (JSON, scripted_response(b"none", 404), INDEX),
    "no path of the kind": (OPENVINO, scripted_response(b"none", 400), INDEX),
    "no list of V1": (KSERVE, scripted_response(b"none", 404), "GET " + MODELS),
}


@pytest.mark.parametrize(("dialect", "step", "question"), LACKING.values(), ids=LACKING)
async def test_server_without_a_model_list_is_omitted_and_named(
    dialect: Dialect, step: ServerStep, question: str
) -> None:
    a, b = servers(a=scripted_response(b'[{"name":"x"}]'), b=step)
    router = by_model(make_destination(a, name="a"), make_destination(b, name="b", dialect=dialect))
    response = await send_request(router, "GET", MODELS)
    assert (response.status, response.body) == (200, b'{"models":["x"]}')
    assert response.headers[FAILED_ENDPOINTS] == "upstream 'b'"
    assert received_requests(a, b) == [[INDEX], [question]]


@pytest.mark.parametrize("status", [400, 401, 403, 422, 503])
async def test_server_that_may_have_a_model_list_is_not_omitted(status: int) -> None:
    a, b = servers(a=scripted_response(b'[{"name":"x"}]'), b=scripted_response(b"no", status))
    response = await send_request(
        by_model(make_destination(a, name="a"), make_destination(b, name="b")), "GET", MODELS
    )
    assert response.status == 502
    assert f"upstream 'b' returned {status}: no" in json.loads(response.body)["error"]


@pytest.mark.parametrize("target", [MODEL, MODELS])
async def test_list_waits_until_all_dialects_are_known(target: str) -> None:
    (a,) = servers(a=scripted_response(b'{"models":["m"]}'))
    destination = make_destination(a)
    upstream = replace(destination.upstream, dialect_state=UndetectedDialectState(KSERVE, None))
    response = await send_request(
        single_destination(replace(destination, upstream=upstream)), "GET", target
    )
    assert response.status == 200
    assert received_requests(a) == [["GET " + target]]


@pytest.mark.parametrize(("target", "question"), [(MODEL, []), (MODELS, [INDEX])])
async def test_server_of_unknown_dialect_that_is_down_is_a_503(
    target: str, question: list[str]
) -> None:
    (a,) = servers(a=connect_error(A))
    destination = make_destination(a)
    upstream = replace(
        destination.upstream, dialect_state=UndetectedDialectState(KSERVE, connect_error(A))
    )
    response = await send_request(
        single_destination(replace(destination, upstream=upstream)), "GET", target
    )
    assert response.status == 503
    assert "cannot connect to upstream 'a'" in json.loads(response.body)["error"]
    assert received_requests(a) == [question]


async def test_error_names_the_upstream_that_is_down() -> None:
    a, b = servers(a=scripted_response(b'[{"name":"x"}]'), b=connect_error(B))
    down = make_destination(b, name="b")
    upstream = replace(
        down.upstream, dialect_state=UndetectedDialectState(KSERVE, connect_error(B))
    )
    router = by_model(make_destination(a, name="a"), replace(down, upstream=upstream))
    response = await send_request(router, "GET", MODELS)
    assert (response.status, json.loads(response.body)["error"]) == (
        502,
        f"GET {MODELS} succeeded at upstream 'a'; failed: "
        "cannot connect to upstream 'b': Connection refused",
    )
