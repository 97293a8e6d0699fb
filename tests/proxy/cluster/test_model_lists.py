"""Lists of models for V2 and V1 clients, and the statistics of several servers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, TRITON, Dialect
from gateway.protocol.operations import OPERATION_KINDS
from gateway.proxy.cluster.scatter_gather import FAILED_ENDPOINTS
from gateway.proxy.destination import Limits
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match, Pattern
from tests.support.doubles.cluster import (
    A,
    B,
    C,
    ServerStep,
    UndetectedDialectState,
    connect_error,
    one_upstream,
    received_requests,
    scripted_response,
    send_request,
    servers,
    upstreams_of,
    weighted_destinations,
)
from tests.support.doubles.streaming import (
    LIMITS,
    ScriptedClientResponse,
    ScriptedEndpoint,
    make_destination,
    ready,
)

INDEX = "/v2/repository/index"
STATISTICS = "/v2/models/stats"


def _models(*names: str) -> ServerStep:
    return scripted_response(
        json.dumps([{"name": name, "state": "READY"} for name in names]).encode()
    )


def _stats(**counts: int) -> ServerStep:
    entries = [{"name": name, "inference_count": count} for name, count in counts.items()]
    return scripted_response(json.dumps({"model_stats": entries}).encode())


def _route(endpoint: ScriptedEndpoint, name: str, model: str = "*", deny: str = "") -> Route:
    return Route(
        Match(model=Pattern.of(model)) if model != "*" else Match(),
        (make_destination(endpoint, name=name),),
        denied_kinds=OPERATION_KINDS[deny] if deny else frozenset(),
    )


def _json(response: ScriptedClientResponse) -> Any:
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["Content-Length"] == str(len(response.body))
    return json.loads(response.body)


def _names(response: ScriptedClientResponse) -> list[str]:
    return [entry["name"] for entry in _json(response)]


# -------------------------------------------------------------------------------------------- index


@pytest.mark.parametrize(
    ("method", "body", "sent"), [("POST", (b'{"ready": true}',), 15), ("GET", (), 0)]
)
async def test_index_has_the_models_of_all_upstreams(
    method: str, body: tuple[bytes, ...], sent: int
) -> None:
    endpoints = servers(a=_models("resnet"), b=_models(), c=_models("bert", "resnet"), d=_models())
    one, two, three, denied = endpoints
    router = Router(
        [
            _route(two, "two", "bert*"),
            _route(denied, "denied", "secret*", deny="repository"),
            _route(three, "three", "m"),
            _route(one, "one"),
        ]
    )
    response = await send_request(
        router, method, INDEX + "?x", *body, headers={"Accept-Encoding": "gzip"}
    )
    assert response.status == 200
    assert _json(response) == [
        {"name": "bert", "state": "READY", "upstream": "three"},
        {"name": "resnet", "state": "READY", "upstream": "three"},
        {"name": "resnet", "state": "READY", "upstream": "one"},
    ]
    assert received_requests(*endpoints) == [*[[f"{method} {INDEX}?x"]] * 3, []]
    for endpoint in endpoints[:3]:
        assert endpoint.bodies == [b"".join(body)]
        described = {"Content-Length": str(sent), "Content-Type": "application/json"}
        assert dict(endpoint.requests[0].headers) == (described if sent else {})


async def test_index_of_equal_servers_is_that_of_one() -> None:
    """The servers of an upstream have the same models: the response of one passes untouched."""
    cluster = one_upstream(a=scripted_response(b"[ ]", 200, {"X-A": "1"}), b=_models())
    headers = {"Accept-Encoding": "gzip"}
    response = await cluster.ask("POST", INDEX, b"{ }", headers=headers)
    assert (response.status, response.body, dict(response.headers)) == (200, b"[ ]", {"X-A": "1"})
    assert cluster.received == [[f"POST {INDEX}"], []]
    assert cluster.endpoints[0].requests[0].headers["Accept-Encoding"] == "gzip"


async def test_index_has_the_models_of_all_endpoints_under_model_discovery() -> None:
    discovering = one_upstream(
        discovers_models=True, a=_models("one", "both"), b=_models("both", "two")
    )
    (other,) = servers(c=_models("both"))
    router = weighted_destinations(*discovering.destinations, make_destination(other, name="e"))
    response = await send_request(router, "POST", INDEX)
    found = sorted((entry["upstream"], entry["name"]) for entry in _json(response))
    assert found == [("e", "both"), ("servers", "both"), ("servers", "one"), ("servers", "two")]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (connect_error(B), "cannot connect to upstream 'b': Connection refused"),
        (scripted_response(b'{"error":"no repository"}', 400), "no repository"),
        (scripted_response(b'["x"]'), "sent no list of models"),
    ],
)
async def test_index_without_one_upstream_is_an_error(step: ServerStep, why: str) -> None:
    response = await upstreams_of(a=_models("x"), b=step).ask("POST", INDEX)
    assert response.status == 502
    error = _json(response)["error"]
    assert "upstream 'b'" in error
    assert why in error


@pytest.mark.parametrize(
    ("headers", "body"),
    [({"Content-Length": "0"}, ()), ({"Transfer-Encoding": "chunked"}, (b"",))],
    ids=["of no bytes", "chunked"],
)
async def test_empty_index_request_becomes_a_json_object(
    headers: dict[str, str], body: tuple[bytes, ...]
) -> None:
    """MLServer requires a body."""
    cluster = upstreams_of(a=_models("x"), b=_models("y"))
    assert _names(await cluster.ask("POST", INDEX, *body, headers=headers)) == ["x", "y"]
    for endpoint in cluster.endpoints:
        assert endpoint.bodies == [b"{}"]
        described = {"Content-Length": "2", "Content-Type": "application/json"}
        assert dict(endpoint.requests[0].headers) == described


V1_LIST = scripted_response(b'{"models":["k","l"]}')


@pytest.mark.parametrize(("method", "body"), [("POST", (b'{"ready":true}',)), ("GET", ())])
async def test_kserve_is_queried_for_its_v1_list(method: str, body: tuple[bytes, ...]) -> None:
    cluster = upstreams_of(a=_models("x"), b=V1_LIST, dialects={"b": KSERVE})
    headers = {"Content-Type": "application/json", "X-A": "1"}
    response = await cluster.ask(method, INDEX + "?x", *body, headers=headers)
    assert _json(response) == [
        {"name": "x", "state": "READY", "upstream": "a"},
        {"name": "k", "upstream": "b"},
        {"name": "l", "upstream": "b"},
    ]
    assert FAILED_ENDPOINTS not in response.headers
    assert cluster.received == [[f"{method} {INDEX}?x"], ["GET /v1/models"]]
    kserve = cluster.endpoints[1]
    assert kserve.bodies == [b""]
    assert dict(kserve.requests[0].headers) == {"X-A": "1"}


NOT_FOUND = scripted_response(b'{"detail":"Not Found"}', 404)
BAD_URL = scripted_response(b'{"error":"Invalid request URL"}', 400)


@pytest.mark.parametrize(
    ("method", "dialect", "step"),
    [
        ("POST", JSON, NOT_FOUND),
        ("POST", JSON, scripted_response(b"", 405)),
        ("GET", KSERVE, NOT_FOUND),
        ("GET", OPENVINO, BAD_URL),
        ("POST", OPENVINO, NOT_FOUND),
    ],
)
async def test_server_without_a_model_list_is_omitted_and_named(
    method: str, dialect: Dialect, step: ServerStep
) -> None:
    cluster = upstreams_of(a=_models("x"), b=step, c=_models(), dialects={"b": dialect})
    response = await cluster.ask(method, INDEX)
    assert _json(response) == [{"name": "x", "state": "READY", "upstream": "a"}]
    assert response.headers[FAILED_ENDPOINTS] == "upstream 'b'"


async def test_endpoint_without_a_model_list_is_omitted_and_named() -> None:
    cluster = one_upstream(
        discovers_models=True, a=_models("x"), b=NOT_FOUND, c=scripted_response(b"", 501)
    )
    response = await cluster.ask("POST", INDEX)
    assert _names(response) == ["x"]
    assert response.headers[FAILED_ENDPOINTS] == "upstream 'b', upstream 'c'"


@pytest.mark.parametrize(
    ("method", "dialect", "step", "why"),
    [
        ("POST", JSON, scripted_response(b"closed", 401), "returned 401: closed"),
        ("GET", JSON, scripted_response(b"by POST", 405), "returned 405: by POST"),
        ("POST", OPENVINO, scripted_response(b"later", 503), "returned 503: later"),
        ("POST", KSERVE, scripted_response(b'{"models":["x",5]}'), "sent no list of models"),
    ],
)
async def test_server_that_may_have_a_model_list_is_not_omitted(
    method: str, dialect: Dialect, step: ServerStep, why: str
) -> None:
    dialects = {"b": dialect, "c": OPENVINO}
    response = await upstreams_of(a=_models("x"), b=step, c=BAD_URL, dialects=dialects).ask(
        method, INDEX
    )
    assert response.status == 502
    error = _json(response)["error"]
    assert "upstream 'b'" in error
    assert "upstream 'c'" not in error
    assert why in error


@pytest.mark.parametrize(
    ("method", "steps", "dialect", "status", "body"),
    [
        (
            "POST",
            {"a": NOT_FOUND, "b": scripted_response(b"none", 404)},
            KSERVE,
            404,
            b'{"detail":"Not Found"}',
        ),
        ("GET", {"a": scripted_response(b"by POST", 405), "b": BAD_URL}, OPENVINO, 405, b"by POST"),
    ],
    ids=["no server has a list", "all servers with a list refuse"],
)
async def test_error_passes_if_no_server_sends_a_list(
    method: str, steps: dict[str, Any], dialect: Dialect, status: int, body: bytes
) -> None:
    response = await upstreams_of(dialects={"b": dialect}, **steps).ask(method, INDEX)
    assert (response.status, response.body) == (status, body)
    assert FAILED_ENDPOINTS not in response.headers


async def test_index_waits_until_all_dialects_are_known() -> None:
    state = UndetectedDialectState(KSERVE, None)
    cluster = upstreams_of(a=_models("x"), b=V1_LIST, dialects={"b": state})
    assert _names(await cluster.ask("POST", INDEX)) == ["x", "k", "l"]
    assert cluster.received[1] == ["GET /v1/models"]


@pytest.mark.parametrize(
    ("hangs", "limits"),
    [
        (False, LIMITS),
        (True, replace(LIMITS, idle_timeout=0.2)),
        (True, replace(LIMITS, request_timeout=2)),
    ],
    ids=["down", "hangs", "would take all the time"],
)
async def test_server_of_unknown_dialect_is_named_with_its_error(
    hangs: bool, limits: Limits
) -> None:
    state = UndetectedDialectState(KSERVE, asyncio.Event() if hangs else connect_error(B))
    cluster = upstreams_of(limits=limits, dialects={"b": state}, a=_models("x"), b=connect_error(B))
    response = await cluster.ask("POST", INDEX)
    assert (response.status, _json(response)["error"]) == (
        502,
        f"POST {INDEX} succeeded at upstream 'a'; failed: "
        "cannot connect to upstream 'b': Connection refused",
    )
    assert cluster.received[1] == [f"POST {INDEX}"]


# --------------------------------------------------------------------------------------- statistics


async def test_statistics_are_those_of_all_endpoints() -> None:
    endpoints = servers(a=_stats(x=1), b=_stats(x=2, y=3), c=_stats(), d=_stats(z=9))
    one = make_destination(*endpoints[:2], name="one")
    router = Router(
        [
            _route(endpoints[2], "two", "m"),
            _route(endpoints[3], "denied", "secret", deny="statistics"),
            Route(Match(), (one,)),
        ]
    )
    response = await send_request(
        router, "GET", STATISTICS + "?x", headers={"Accept-Encoding": "gzip"}
    )
    assert response.status == 200
    assert _json(response) == {
        "model_stats": [
            {"name": "x", "inference_count": 1, "upstream": "one", "endpoint": A},
            {"name": "x", "inference_count": 2, "upstream": "one", "endpoint": B},
            {"name": "y", "inference_count": 3, "upstream": "one", "endpoint": B},
        ]
    }
    assert FAILED_ENDPOINTS not in response.headers
    assert received_requests(*endpoints) == [*[[f"GET {STATISTICS}?x"]] * 3, []]
    assert dict(endpoints[0].requests[0].headers) == {}


@pytest.mark.parametrize(
    ("limits", "failing"),
    [
        (LIMITS, connect_error(A)),
        (replace(LIMITS, request_timeout=0.2), asyncio.Event()),
    ],
)
async def test_statistics_name_failed_endpoints(limits: Limits, failing: ServerStep) -> None:
    response = await one_upstream(limits=limits, a=failing, b=_stats(x=1), c=failing).ask(
        "GET", STATISTICS
    )
    assert response.status == 200
    assert [entry["endpoint"] for entry in _json(response)["model_stats"]] == [B]
    assert response.headers[FAILED_ENDPOINTS] == f"{A}, {C}"


@pytest.mark.parametrize(
    ("steps", "status", "told"),
    [
        ({"a": connect_error(A), "b": connect_error(B)}, 503, f"cannot connect to {A}"),
        ({"a": scripted_response(b"[]"), "b": _stats()}, 502, f"{A} sent no list of models"),
        ({"a": _stats(), "b": scripted_response(b'{"model_stats":{}}')}, 502, f"{B} sent no list"),
    ],
)
async def test_invalid_statistics_are_a_502(steps: dict[str, Any], status: int, told: str) -> None:
    response = await one_upstream(**steps).ask("GET", STATISTICS)
    assert response.status == status
    assert told in _json(response)["error"]


async def test_large_numbers_stay_exact() -> None:
    counts = [2**64 - 1, -(2**63)]
    cluster = one_upstream(a=_stats(x=counts[0]), b=_stats(x=counts[1]))
    found = _json(await cluster.ask("GET", STATISTICS))["model_stats"]
    assert [entry["inference_count"] for entry in found] == counts


# ----------------------------------------------------------------------------------------------- V1


MODEL = "/v1/models/m"
MODELS = "/v1/models"
READY = "GET /v2/models/m/ready"
ASKED_INDEX = f"POST {INDEX}"


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
    assert (response.status, _json(response)["error"]) == (404, told)


async def test_endpoint_that_has_the_model_is_asked() -> None:
    responses = (scripted_response(b""),) * 3
    cluster = one_upstream(discovers_models=True, a=responses, b=responses)
    for member, model in zip(cluster.destinations[0].upstream.pool.members, "nm", strict=True):
        member.models = ready(model)
    for _ in range(3):
        assert (await cluster.ask("GET", MODEL)).status == 200
    assert cluster.received == [[], [READY] * 3]


async def test_v1_server_gets_the_request_unchanged_but_no_version() -> None:
    cluster = one_upstream(dialect=KSERVE, a=scripted_response(b'{"name":"m","ready":"True"}'))
    assert (await cluster.ask("GET", MODEL)).body == b'{"name":"m","ready":"True"}'
    response = await cluster.ask("GET", MODEL + "/versions/1")
    assert response.status == 501
    assert f"does not support model versions; use {MODEL}" in _json(response)["error"]
    assert cluster.received == [["GET " + MODEL]]


async def test_list_has_the_models_of_one_server() -> None:
    index = [{"name": "b", "state": "READY"}, {"name": "a", "state": "UNAVAILABLE"}, {"name": "c"}]
    cluster = one_upstream(a=scripted_response(json.dumps(index).encode()))
    response = await cluster.ask("GET", MODELS)
    assert (response.status, response.body) == (200, b'{"models":["b","c"]}')
    assert cluster.received == [[ASKED_INDEX]]
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
    assert cluster.received == [[ASKED_INDEX], ["GET " + MODELS], [ASKED_INDEX]]


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
    assert cluster.received == [[ASKED_INDEX, "GET " + MODELS + "?x=1"]]
    (endpoint,) = cluster.endpoints
    assert endpoint.requests[-1].headers["Y"] == "2"
    assert endpoint.bodies[-1] == b""


@pytest.mark.parametrize("status", [408, 429, 500])
async def test_failing_index_is_still_an_index(status: int) -> None:
    cluster = one_upstream(a=scripted_response(b"not now", status))
    response = await cluster.ask("GET", MODELS)
    assert (response.status, response.body) == (status, b'{"error":"not now"}')
    assert cluster.received == [[ASKED_INDEX]]


async def test_list_of_several_upstreams_is_never_that_of_one() -> None:
    cluster = upstreams_of(a=scripted_response(b"none", 404), b=scripted_response(b"none", 404))
    response = await cluster.ask("GET", MODELS)
    assert (response.status, response.body) == (404, b'{"error":"none"}')
    assert FAILED_ENDPOINTS not in response.headers
    assert cluster.received == [[ASKED_INDEX], [ASKED_INDEX]]


@pytest.mark.parametrize("body", [b"no", b"5", b'{"models":5}', b"[1]"])
async def test_invalid_list_is_a_502(body: bytes) -> None:
    response = await one_upstream(a=scripted_response(body)).ask("GET", MODELS)
    assert response.status == 502
    assert "sent no list of models" in _json(response)["error"]


@pytest.mark.parametrize(
    ("target", "is_known", "question"),
    [(MODEL, True, [READY]), (MODEL, False, []), (MODELS, False, [ASKED_INDEX])],
)
async def test_server_that_is_down_is_a_503(
    target: str, is_known: bool, question: list[str]
) -> None:
    state = TRITON if is_known else UndetectedDialectState(KSERVE, connect_error(A))
    cluster = one_upstream(dialect=state, a=connect_error(A))
    response = await cluster.ask("GET", target)
    assert response.status == 503
    assert "cannot connect to upstream 'a'" in _json(response)["error"]
    assert cluster.received == [question]
