"""The repository index and the statistics of several servers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, Dialect
from gateway.protocol.operations import OPERATION_KINDS
from gateway.proxy.cluster.scatter_gather import FAILED_ENDPOINTS
from gateway.proxy.destination import Destination, Limits
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match, Pattern
from gateway.upstream.pool.model_discovery import ModelDiscovery
from gateway.upstream.pool.supervisor import PoolSupervisor
from tests.support.doubles.cluster import (
    A,
    B,
    C,
    ServerStep,
    UndetectedDialectState,
    connect_error,
    received_requests,
    scripted_response,
    send_request,
    servers,
    weighted_destinations,
)
from tests.support.doubles.streaming import (
    LIMITS,
    ScriptedClientResponse,
    ScriptedEndpoint,
    make_destination,
    single_destination,
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


def _route(endpoint: ScriptedEndpoint, name: str, model: str = "", deny: str = "") -> Route:
    match = Match(model=Pattern.of(model)) if model else Match()
    return Route(
        match,
        (make_destination(endpoint, name=name),),
        denied_kinds=OPERATION_KINDS[deny] if deny else frozenset(),
    )


def _json(response: ScriptedClientResponse) -> Any:
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["Content-Length"] == str(len(response.body))
    return json.loads(response.body)


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


async def test_upstream_of_several_rules_is_listed_once() -> None:
    """The servers of an upstream have the same models: the response of one passes untouched."""
    endpoints = servers(a=scripted_response(b"[ ]", 200, {"X-A": "1"}), b=_models(), c=_models())
    destination = make_destination(*endpoints[:2])
    denied = _route(endpoints[2], "denied", deny="repository")
    router = Router(
        [
            Route(Match(model=Pattern.of("m")), (destination,)),
            Route(Match(), (destination,)),
            denied,
        ]
    )
    response = await send_request(
        router, "POST", INDEX, b"{ }", headers={"Accept-Encoding": "gzip"}
    )
    assert (response.status, response.body, dict(response.headers)) == (200, b"[ ]", {"X-A": "1"})
    assert received_requests(*endpoints) == [[f"POST {INDEX}"], [], []]
    assert endpoints[0].requests[0].headers["Accept-Encoding"] == "gzip"


async def test_index_comes_from_another_endpoint_if_one_is_unreachable() -> None:
    one, down, up = servers(a=_models("x"), b=connect_error(B), c=_models("y"))
    router = weighted_destinations(
        make_destination(one, name="one"), make_destination(down, up, name="two")
    )
    assert [entry["name"] for entry in _json(await send_request(router, "POST", INDEX))] == [
        "x",
        "y",
    ]


def _discovering(*endpoints: ScriptedEndpoint, name: str = "servers") -> Destination:
    return make_destination(
        *endpoints, name=name, supervisor=PoolSupervisor(model_discovery=ModelDiscovery(60))
    )


async def test_index_has_the_models_of_all_endpoints_under_model_discovery() -> None:
    endpoints = servers(a=_models("one", "both"), b=_models("both", "two"), c=_models("both"))
    router = weighted_destinations(
        _discovering(*endpoints[:2], name="d"), make_destination(endpoints[2], name="e")
    )
    response = await send_request(router, "POST", INDEX)
    assert response.status == 200
    found = sorted((entry["upstream"], entry["name"]) for entry in _json(response))
    assert found == [("d", "both"), ("d", "one"), ("d", "two"), ("e", "both")]


async def test_index_of_one_upstream_has_the_models_of_all_its_endpoints() -> None:
    endpoints = servers(a=_models("one"), b=_models("two"))
    response = await send_request(single_destination(_discovering(*endpoints)), "POST", INDEX)
    assert sorted(entry["name"] for entry in _json(response)) == ["one", "two"]


async def test_index_fails_if_one_endpoint_under_model_discovery_fails() -> None:
    endpoints = servers(a=_models("one"), b=connect_error(B))
    response = await send_request(single_destination(_discovering(*endpoints)), "POST", INDEX)
    assert response.status == 502
    assert "cannot connect to upstream 'b': " in response.body.decode()


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (connect_error(B), "cannot connect to upstream 'b': Connection refused"),
        (scripted_response(b'{"error":"no repository"}', 400), "no repository"),
        (scripted_response(b"["), "sent no list of models"),
        (scripted_response(b"{}"), "sent no list of models"),
        (scripted_response(b'["x"]'), "sent no list of models"),
        (
            scripted_response(b'[{"x":' + b"[" * 500 + b"]" * 500 + b"}]"),
            "sent no list of models",
        ),
    ],
)
async def test_index_without_one_upstream_is_an_error(step: ServerStep, why: str) -> None:
    one, two = servers(a=_models("x"), b=step)
    router = weighted_destinations(
        make_destination(one, name="one"), make_destination(two, name="two")
    )
    response = await send_request(router, "POST", INDEX)
    assert response.status == 502
    error = _json(response)["error"]
    assert "upstream 'two'" in error or "upstream 'b'" in error
    assert why in error


async def test_error_names_an_upstream_that_hangs() -> None:
    one, two = servers(a=_models("x"), b=asyncio.Event())
    limits = replace(LIMITS, idle_timeout=0.2)
    router = weighted_destinations(
        *(make_destination(each, limits=limits, name=each.url[7:8]) for each in (one, two))
    )
    response = await send_request(router, "POST", INDEX)
    assert (response.status, _json(response)["error"]) == (
        502,
        f"POST {INDEX} succeeded at upstream 'a'; failed: "
        "waiting for upstream 'b': nothing moved for 0.2 s (limits.idle_timeout)",
    )


async def test_equal_errors_of_all_servers_pass_to_the_client() -> None:
    one, two = servers(
        a=scripted_response(b'{"error":"malformed"}', 400), b=scripted_response(b"other", 400)
    )
    router = weighted_destinations(
        make_destination(one, name="one"), make_destination(two, name="two")
    )
    response = await send_request(router, "POST", INDEX, b"nonsense")
    assert (response.status, response.body) == (400, b'{"error":"malformed"}')


@pytest.mark.parametrize(
    ("headers", "body"),
    [({}, ()), ({"Content-Length": "0"}, ()), ({"Transfer-Encoding": "chunked"}, (b"",))],
    ids=["none", "of no bytes", "chunked"],
)
async def test_empty_index_request_becomes_a_json_object(
    headers: dict[str, str], body: tuple[bytes, ...]
) -> None:
    """MLServer requires a body."""
    endpoints = servers(a=_models("x"), b=_models("y"))
    router = weighted_destinations(
        *(make_destination(each, name=each.url[7:8]) for each in endpoints)
    )
    response = await send_request(router, "POST", INDEX, *body, headers=headers)
    assert [entry["name"] for entry in _json(response)] == ["x", "y"]
    for endpoint in endpoints:
        assert endpoint.bodies == [b"{}"]
        described = {"Content-Length": "2", "Content-Type": "application/json"}
        assert dict(endpoint.requests[0].headers) == described


V1_LIST = scripted_response(b'{"models":["k","l"]}')


@pytest.mark.parametrize(
    ("method", "body"), [("POST", (b'{"ready":true}',)), ("POST", ()), ("GET", ())]
)
async def test_kserve_is_queried_for_its_v1_list(method: str, body: tuple[bytes, ...]) -> None:
    triton, kserve = endpoints = servers(a=_models("x"), b=V1_LIST)
    router = weighted_destinations(
        make_destination(triton, name="triton"),
        make_destination(kserve, name="kserve", dialect=KSERVE),
    )
    headers = {"Content-Type": "application/json", "X-A": "1"}
    response = await send_request(router, method, INDEX + "?x", *body, headers=headers)
    assert _json(response) == [
        {"name": "x", "state": "READY", "upstream": "triton"},
        {"name": "k", "upstream": "kserve"},
        {"name": "l", "upstream": "kserve"},
    ]
    assert FAILED_ENDPOINTS not in response.headers
    assert received_requests(*endpoints) == [[f"{method} {INDEX}?x"], ["GET /v1/models"]]
    assert kserve.bodies == [b""]
    assert dict(kserve.requests[0].headers) == {"X-A": "1"}


NOT_FOUND = scripted_response(b'{"detail":"Not Found"}', 404)
BAD_URL = scripted_response(b'{"error":"Invalid request URL"}', 400)


@pytest.mark.parametrize(
    ("method", "dialect", "step"),
    [
        ("POST", JSON, NOT_FOUND),
        ("POST", JSON, scripted_response(b"", 405)),
        ("POST", JSON, scripted_response(b"", 501)),
        ("POST", KSERVE, NOT_FOUND),
        ("GET", KSERVE, NOT_FOUND),
        ("POST", OPENVINO, BAD_URL),
        ("GET", OPENVINO, BAD_URL),
        ("POST", OPENVINO, NOT_FOUND),
    ],
)
async def test_server_without_a_model_list_is_omitted_and_named(
    method: str, dialect: Dialect, step: ServerStep
) -> None:
    a, b, c = servers(a=_models("x"), b=step, c=_models())
    router = weighted_destinations(
        make_destination(a, name="a"),
        make_destination(b, name="b", dialect=dialect),
        make_destination(c, name="c"),
    )
    response = await send_request(router, method, INDEX)
    assert _json(response) == [{"name": "x", "state": "READY", "upstream": "a"}]
    assert response.headers[FAILED_ENDPOINTS] == "upstream 'b'"


async def test_endpoint_without_a_model_list_is_omitted_and_named() -> None:
    endpoints = servers(a=_models("x"), b=NOT_FOUND, c=scripted_response(b"", 501))
    response = await send_request(single_destination(_discovering(*endpoints)), "POST", INDEX)
    assert [entry["name"] for entry in _json(response)] == ["x"]
    assert response.headers[FAILED_ENDPOINTS] == "upstream 'b', upstream 'c'"


@pytest.mark.parametrize(
    ("method", "dialect", "step", "why"),
    [
        ("POST", JSON, scripted_response(b"closed", 401), "returned 401: closed"),
        ("POST", JSON, scripted_response(b"what?", 422), "returned 422: what?"),
        ("POST", JSON, scripted_response(b"later", 503), "returned 503: later"),
        ("GET", JSON, scripted_response(b"by POST", 405), "returned 405: by POST"),
        ("GET", JSON, scripted_response(b"by POST", 404), "returned 404: by POST"),
        ("POST", OPENVINO, scripted_response(b"later", 503), "returned 503: later"),
        ("POST", OPENVINO, connect_error(B), "cannot connect to upstream 'b'"),
        (
            "POST",
            KSERVE,
            scripted_response(b'{"models":["x",5]}'),
            "sent no list of models",
        ),
        (
            "POST",
            KSERVE,
            scripted_response(b'{"object":"list"}'),
            "sent no list of models",
        ),
    ],
)
async def test_server_that_may_have_a_model_list_is_not_omitted(
    method: str, dialect: Dialect, step: ServerStep, why: str
) -> None:
    a, b, c = servers(a=_models("x"), b=step, c=BAD_URL)
    router = weighted_destinations(
        make_destination(a, name="a"),
        make_destination(b, name="b", dialect=dialect),
        make_destination(c, name="c", dialect=OPENVINO),
    )
    response = await send_request(router, method, INDEX)
    assert response.status == 502
    error = _json(response)["error"]
    assert "upstream 'b'" in error
    assert "upstream 'c'" not in error
    assert why in error


async def test_error_passes_if_no_server_has_a_model_list() -> None:
    a, b = servers(a=NOT_FOUND, b=scripted_response(b"none", 404))
    router = weighted_destinations(
        make_destination(a, name="a"), make_destination(b, name="b", dialect=KSERVE)
    )
    response = await send_request(router, "POST", INDEX)
    assert (response.status, response.body) == (404, b'{"detail":"Not Found"}')
    assert FAILED_ENDPOINTS not in response.headers


async def test_error_passes_if_all_servers_with_a_list_refuse() -> None:
    a, b = servers(a=scripted_response(b"by POST", 405), b=BAD_URL)
    router = weighted_destinations(
        make_destination(a, name="a"), make_destination(b, name="b", dialect=OPENVINO)
    )
    response = await send_request(router, "GET", INDEX)
    assert (response.status, response.body) == (405, b"by POST")


def _undeclared(
    destination: Destination, fault: BaseException | asyncio.Event | None
) -> Destination:
    return replace(
        destination,
        upstream=replace(destination.upstream, dialect_state=UndetectedDialectState(KSERVE, fault)),
    )


async def test_index_waits_until_all_dialects_are_known() -> None:
    a, b = servers(a=_models("x"), b=V1_LIST)
    router = weighted_destinations(
        make_destination(a, name="a"), _undeclared(make_destination(b, name="b"), None)
    )
    response = await send_request(router, "POST", INDEX)
    assert [entry["name"] for entry in _json(response)] == ["x", "k", "l"]
    assert received_requests(b) == [["GET /v1/models"]]


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
    fault = asyncio.Event() if hangs else connect_error(B)
    a, b = servers(a=_models("x"), b=connect_error(B))
    router = weighted_destinations(
        make_destination(a, name="a", limits=limits),
        _undeclared(make_destination(b, name="b", limits=limits), fault),
    )
    response = await send_request(router, "POST", INDEX)
    assert (response.status, _json(response)["error"]) == (
        502,
        f"POST {INDEX} succeeded at upstream 'a'; failed: "
        "cannot connect to upstream 'b': Connection refused",
    )
    assert received_requests(b) == [[f"POST {INDEX}"]]


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_other_methods_go_to_one_server(method: str) -> None:
    endpoints = servers(a=scripted_response(b""), b=scripted_response(b""))
    assert (
        await send_request(weighted_destinations(*map(make_destination, endpoints)), method, INDEX)
    ).status == 200
    assert received_requests(*endpoints) == [[f"{method} {INDEX}"], []]


# --------------------------------------------------------------------------------------- statistics


async def test_statistics_are_those_of_all_endpoints() -> None:
    endpoints = servers(a=_stats(x=1), b=_stats(x=2, y=3), c=_stats(), d=_stats(z=9))
    one = make_destination(*endpoints[:2], name="one")
    router = Router(
        [
            Route(Match(model=Pattern.of("m")), (make_destination(endpoints[2], name="two"),)),
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


async def test_statistics_of_one_server_pass_untouched() -> None:
    (endpoint,) = servers(a=scripted_response(b'{ "model_stats": [] }', 200, {"X-A": "1"}))
    response = await send_request(single_destination(make_destination(endpoint)), "GET", STATISTICS)
    assert (response.body, dict(response.headers)) == (b'{ "model_stats": [] }', {"X-A": "1"})


async def test_statistics_name_failed_endpoints() -> None:
    endpoints = servers(a=connect_error(A), b=_stats(x=1), c=scripted_response(b"", 500))
    destination = make_destination(*endpoints)
    response = await send_request(single_destination(destination), "GET", STATISTICS)
    assert [entry["endpoint"] for entry in _json(response)["model_stats"]] == [B]
    assert response.headers[FAILED_ENDPOINTS] == f"{A}, {C}"
    assert sum(destination.upstream.pool.outstanding) == 0


@pytest.mark.parametrize(
    "limits", [replace(LIMITS, idle_timeout=0.2), replace(LIMITS, request_timeout=0.2)]
)
async def test_statistics_name_an_endpoint_that_hangs(limits: Limits) -> None:
    endpoints = servers(a=_stats(x=1), b=asyncio.Event(), c=_stats(x=2))
    destination = make_destination(*endpoints, limits=limits)
    response = await send_request(single_destination(destination), "GET", STATISTICS)
    assert response.status == 200
    assert [entry["endpoint"] for entry in _json(response)["model_stats"]] == [A, C]
    assert response.headers[FAILED_ENDPOINTS] == B


@pytest.mark.parametrize(
    ("steps", "status", "told"),
    [
        ({"a": connect_error(A), "b": connect_error(B)}, 503, f"cannot connect to {A}"),
        (
            {"a": scripted_response(b"[]"), "b": _stats()},
            502,
            f"{A} sent no list of models",
        ),
        (
            {"a": _stats(), "b": scripted_response(b'{"model_stats":{}}')},
            502,
            f"{B} sent no list",
        ),
        ({"a": _stats(), "b": scripted_response(b"{")}, 502, f"{B} sent no list"),
        ({"a": _stats(), "b": scripted_response(b"{}")}, 502, f"{B} sent no list"),
    ],
)
async def test_invalid_statistics_are_a_502(
    steps: dict[str, ServerStep], status: int, told: str
) -> None:
    response = await send_request(
        single_destination(make_destination(*servers(**steps))), "GET", STATISTICS
    )
    assert response.status == status
    assert told in _json(response)["error"]


async def test_large_numbers_stay_exact() -> None:
    count = 2**64 - 1
    response = await send_request(
        single_destination(make_destination(*servers(a=_stats(x=count), b=_stats(x=-(2**63))))),
        "GET",
        STATISTICS,
    )
    counts = [entry["inference_count"] for entry in _json(response)["model_stats"]]
    assert counts == [count, -(2**63)]
