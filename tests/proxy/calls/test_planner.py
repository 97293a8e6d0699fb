"""Which requests take the fast path, and how they are sent."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.http1.head import MAX_CACHED_HEAD
from gateway.protocol.dialects import DIALECTS
from gateway.protocol.grpc.methods import find_method
from gateway.protocol.grpc.model_scanner import ScannedModel
from gateway.protocol.operations import OPERATION_KINDS
from gateway.proxy.calls.planner import Planner
from gateway.proxy.filters.authentication import KeyGroup
from gateway.proxy.router import Route, RouteMatch, Router
from gateway.routing.balancer import LoadBalancingPolicy
from gateway.routing.matcher import Match, Pattern
from gateway.sizes import CONVERT_CHUNK, MAX_FAST_REQUEST, MAX_UNSCHEDULED
from gateway.upstream.pool.pool import Pool
from tests.proxy.calls.scene import JSON, Scene, binary_response, make_plan, plan_of, start
from tests.support.doubles.fast_path import ReadyEndpoint, ScriptedClient, response_head
from tests.support.doubles.streaming import (
    LIMITS,
    EventLog,
    ScriptedRequest,
    client_head,
    make_destination,
    single_destination,
)
from tests.support.inference_messages import FLOATS, HEADER_LENGTH, INFER

PREDICT = "/v1/models/m:predict"
JSON_TYPE = {"Content-Type": "application/json"}

FLOODS: dict[str, tuple[str, str]] = {
    "heads": (INFER, "host-{}"),
    "models": ("/v2/models/m{}/infer", "h"),
}


@pytest.mark.parametrize(("target", "host"), FLOODS.values(), ids=FLOODS)
async def test_plans_are_still_found_after_a_flood_of_other_heads(target: str, host: str) -> None:
    planner = Planner(single_destination(make_destination(ReadyEndpoint())))
    innocents = [(INFER, JSON_TYPE), (PREDICT, JSON_TYPE), ("/v2/models/m/stats", {})]
    before = [plan_of(planner, "POST", *each) for each in innocents]
    assert None not in before
    for number in range(5000):
        headers = {**JSON_TYPE, "Host": host.format(number)}
        assert plan_of(planner, "POST", target.format(number), headers) is not None
    after = [plan_of(planner, "POST", *each) for each in innocents]
    assert all(one is other for one, other in zip(before, after, strict=True))
    planner.close()


class _CountingRouter(Router):
    """Counts how often it looks for a route."""

    searches = 0

    def find(self, *head: Any) -> RouteMatch:
        self.searches += 1
        return super().find(*head)


STREAM = {"Content-Type": "application/grpc"}
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("POST", INFER, JSON_TYPE),
        ("POST", INFER, {"Expect": "100-continue"}),
        ("GET", "/v2/x", {}),
        ("POST", STREAM_INFER, STREAM),
    ],
    ids=["inference", "never on the fast path", "no route", "gRPC"],
)
async def test_requests_with_the_same_head_have_one_plan_on_either_path(
    method: str, target: str, headers: dict[str, str]
) -> None:
    destination = make_destination(ReadyEndpoint())
    match = Match(kinds=OPERATION_KINDS["infer"])
    router = _CountingRouter([Route(match, (destination,))])
    planner = Planner(router)
    for number in range(1, 4):
        request = ScriptedRequest(EventLog(), method, target, headers)
        for trace_id in "ab":
            noted = {**headers, "X-Request-Id": trace_id}
            request.head = client_head(method, target, noted, planner.head_parser)
            planner.plan(request.head, target)
            with suppress(GatewayError):
                if headers is STREAM:
                    named = ScannedModel("m", ""), ("m",)
                    planner.route_of_rpc(request, find_method(target), named)
                else:
                    planner.route_of(request)
        assert router.searches == number
        planner.clear_plans()
    planner.close()


STREAMED: dict[str, tuple[str, str, dict[str, str]]] = {
    "HEAD": ("HEAD", "/v2/x", {}),
    "GET that waits to be told": ("GET", "/v2/x", {"Expect": "100-continue"}),
    "another expectation": ("POST", "/v2/x", {"Expect": "more"}),
    "no header length": ("POST", INFER, {HEADER_LENGTH: ""}),
    "trace settings": ("GET", "/v2/trace/setting", {}),
    "load": ("POST", "/v2/repository/models/m/load", {}),
    "liveness": ("GET", "/v2/health/live", {}),
}


@pytest.mark.parametrize(("method", "target", "headers"), STREAMED.values(), ids=STREAMED)
async def test_other_request_takes_the_streaming_path(
    method: str, target: str, headers: dict[str, str]
) -> None:
    assert make_plan(method, target, headers) is None


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        *[(method, "/v2/x", {}) for method in ("POST", "PUT", "DELETE", "OPTIONS")],
        ("POST", INFER, {}),
        ("POST", INFER, {"Content-Length": "0", HEADER_LENGTH: "0"}),
        ("POST", PREDICT, {"Content-Length": "0"}),
    ],
)
async def test_request_without_length_or_body_takes_the_streaming_path(
    method: str, target: str, headers: dict[str, str]
) -> None:
    scene = Scene()
    assert scene.start(method, target, b"", headers) is None
    assert scene.log == ["connection is not used"]


@pytest.mark.parametrize(
    ("target", "length", "limits", "on_fast_path"),
    [
        ("/v2/x", 1001, {"max_inference_header_bytes": 1000}, True),
        ("/v2/x", CONVERT_CHUNK + 1, {"max_request_bytes": 10 * CONVERT_CHUNK}, False),
        (INFER, 1001, {"max_request_bytes": 1000}, False),
        (INFER, 1001, {"max_inference_header_bytes": 1000}, False),
        (INFER, MAX_FAST_REQUEST, {"max_inference_header_bytes": 2 * MAX_FAST_REQUEST}, True),
        (INFER, MAX_FAST_REQUEST + 1, {"max_inference_header_bytes": 2 * MAX_FAST_REQUEST}, False),
        (PREDICT, MAX_UNSCHEDULED, {"max_inference_header_bytes": 10 * CONVERT_CHUNK}, True),
        (PREDICT, MAX_UNSCHEDULED + 1, {"max_inference_header_bytes": 10 * CONVERT_CHUNK}, False),
    ],
)
async def test_request_over_a_cap_takes_the_streaming_path(
    target: str, length: int, limits: dict[str, Any], on_fast_path: bool
) -> None:
    plan = make_plan("POST", target, {}, replace(LIMITS, **limits))
    assert plan is not None
    assert (length <= plan.max_size) is on_fast_path


# ----------------------------------------------------------------------------------------- requests


def _of_size(size: int) -> bytes:
    return JSON.replace(b"1.5", b" " * (size - len(JSON)) + b"1.5")


async def test_one_large_request_is_converted_per_time_slice() -> None:
    scene = Scene(replace(LIMITS, max_inference_header_bytes=MAX_FAST_REQUEST))
    large, small = _of_size(MAX_FAST_REQUEST), _of_size(MAX_UNSCHEDULED)
    assert scene.start(body=large) is not None
    assert scene.start(body=large) is None
    assert scene.start(body=small) is not None
    await asyncio.sleep(0)
    assert scene.start(body=large) is not None
    assert len(scene.endpoint.asked) == 3


async def test_invalid_request_takes_the_streaming_path() -> None:
    scene = Scene()
    assert scene.start(body=JSON.replace(b"1.5", b"1e99")) is None
    assert scene.log == ["connection is not used"]
    assert scene.outstanding == 0


@pytest.mark.parametrize(("method", "body"), [("GET", b""), ("POST", JSON)])
async def test_request_takes_the_streaming_path_if_no_connection_can_be_reserved(
    method: str, body: bytes
) -> None:
    scene = Scene()
    scene.endpoint.ready = False
    assert scene.start(method, INFER, body) is None
    assert scene.log == []
    assert scene.outstanding == 0
    assert scene.clock.timers == []
    scene.endpoint.ready = True
    assert scene.start(method, INFER, body) is not None


async def test_upstream_without_endpoints_takes_the_streaming_path() -> None:
    destination = make_destination(ReadyEndpoint())
    planner = Planner(single_destination(destination))
    destination.upstream.pool.set_endpoints([])
    assert start(planner, "GET", "/v2/x", {}, b"", ScriptedClient()) is None
    await destination.upstream.pool.close()


def test_no_dialect_refuses_a_head_part_that_the_fast_path_takes() -> None:
    limits = [dialect.max_head_part for dialect in DIALECTS.values()]
    assert all(limit is None or limit >= MAX_CACHED_HEAD for limit in limits)


NOTED = {
    "X-Request-Id": "1",
    "X-Forwarded-For": "192.0.2.1",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "public.example",
    "Forwarded": "for=192.0.2.1",
}
ALL_NOTED = frozenset(name.lower() for name in NOTED)


def _router(*headers: str, dropped: frozenset[str] = frozenset()) -> tuple[Router, ReadyEndpoint]:
    """Return routes: one for requests whose ``headers`` are "yes", and one for all others."""
    chosen = ReadyEndpoint()
    match = Match(headers=tuple((name, Pattern.of("yes")) for name in headers))
    other = make_destination(ReadyEndpoint())
    routes = [
        Route(match, (make_destination(chosen),), dropped_headers=dropped),
        Route(Match(), (other,), dropped_headers=dropped),
    ]
    return Router(routes), chosen


# ------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("dropped", [frozenset[str](), ALL_NOTED], ids=["passed", "replaced"])
@pytest.mark.parametrize(("method", "target"), [("GET", "/v2/x"), ("POST", INFER)])
async def test_noted_and_passed_headers_do_not_change_the_plan(
    method: str, target: str, dropped: frozenset[str]
) -> None:
    planner = Planner(_router("X-Kind", dropped=dropped)[0])
    plans = [
        plan_of(planner, method, target, headers)
        for headers in (
            {},
            {"Traceparent": "00-1-2-03", "Cookie": "a=b"},
            {"Accept": "*/*", "User-Agent": "x", "Content-Length": "5"},
            NOTED,
            {name: f"{value}0" for name, value in NOTED.items()},
        )
    ]
    assert plans[0] is not None
    assert all(plan is plans[0] for plan in plans)
    assert plan_of(planner, method, target, {"x-kind": "yes"}) is not plans[0]
    planner.close()


@pytest.mark.parametrize("dropped", [frozenset[str](), ALL_NOTED], ids=["passed", "replaced"])
@pytest.mark.parametrize("name", ["X-Request-Id", "Forwarded"])
async def test_route_can_match_a_noted_header(name: str, dropped: frozenset[str]) -> None:
    router, chosen = _router(name, dropped=dropped)
    planner = Planner(router)
    for value, times in [("no", 0), ("yes", 1), ("no", 1), ("yes", 2)]:
        headers = {name: value, "X-A": "1"}
        assert start(planner, "GET", "/v2/x", headers, b"", ScriptedClient()) is not None
        assert len(chosen.asked) == times
    expected = {"Host": "h", "X-A": "1", **({} if dropped else {name: "yes"})}
    for asked in chosen.asked:
        assert sorted(asked.lines) == sorted(expected.items())
    planner.close()


@pytest.mark.parametrize("header", ["X-Key", "X-Request-Id", None])
async def test_plan_of_an_authenticated_client_is_for_its_key_only(header: str | None) -> None:
    group = KeyGroup("g", header, ["secret"])
    name = group.header_name
    dropped = ALL_NOTED | {name.lower()}
    route = Route(
        Match(), (make_destination(ReadyEndpoint()),), keys=(group,), dropped_headers=dropped
    )
    planner = Planner(Router([route]))
    key = "secret" if header else "Bearer secret"
    assert plan_of(planner, "GET", "/v2/x", {name: key}) is not None
    for headers in ({}, {name: "other"}, {name: f"{key}x"}):
        assert plan_of(planner, "GET", "/v2/x", headers) is None
    planner.close()


async def test_plan_of_an_open_route_is_not_for_a_client_with_a_key() -> None:
    """Its Authorization may hold a key of a group with another header, which no server may get."""
    group = KeyGroup("g", "X-Key", ["secret"])
    endpoint = ReadyEndpoint()
    to = (make_destination(endpoint),)
    routes = [Route(Match(model=Pattern.of("m")), to, keys=(group,)), Route(Match(), to)]
    planner = Planner(Router(routes))
    for value in ("Bearer of-the-server", "Bearer secret"):
        headers = {"Authorization": value}
        assert start(planner, "GET", "/v2/x", headers, b"", ScriptedClient()) is not None
    passed, withheld = (dict(asked.lines) for asked in endpoint.asked)
    assert passed["Authorization"] == "Bearer of-the-server"
    assert "Authorization" not in withheld
    planner.close()


@pytest.mark.parametrize("header", ["X-User", "X-Forwarded-For"])
async def test_hash_header_chooses_the_endpoint(header: str) -> None:
    """A client's header counts, too, that the gateway replaces only if it is set to do so."""
    endpoints = [ReadyEndpoint(url=f"http://{number}") for number in range(4)]
    destination = make_destination(*endpoints)
    pool = Pool(endpoints, load_balancing=LoadBalancingPolicy(hash_header=header))
    upstream = replace(destination.upstream, pool=pool)
    planner = Planner(single_destination(replace(destination, upstream=upstream)))
    for user in range(20):
        before = [len(each.asked) for each in endpoints]
        for _ in range(4):
            headers = {header: str(user)}
            assert start(planner, "GET", "/v2/x", headers, b"", ScriptedClient()) is not None
        grown = [len(each.asked) - old for each, old in zip(endpoints, before, strict=True)]
        assert sorted(grown) == [0, 0, 0, 4]
    assert min(len(each.asked) for each in endpoints) > 0
    planner.close()


# ---------------------------------------------------------------------------------------- requests


async def test_each_request_has_its_own_passed_headers() -> None:
    scene = Scene()
    for value in ("caf\xe9", "b", ""):
        assert scene.start("GET", "/v2/x", b"", [("X-A", value), ("x-a", value)]) is not None
        assert sorted(scene.asked.lines) == [("Host", "h"), ("X-A", value), ("x-a", value)]


# --------------------------------------------------------------------------------------- responses


@pytest.mark.parametrize("way", ["infer", "get"])
async def test_headers_that_connection_names_are_dropped_from_a_response(way: str) -> None:
    scene = Scene()
    getattr(scene, way)()
    headers, body = binary_response(FLOATS.tobytes())
    headers |= {"Connection": "close, x-HOP, Content-Type", "X-Hop": "1", "Vary": "*", "X": "2"}
    scene.receiver.on_complete(response_head(headers=headers), body)
    names = {name.lower() for name, _ in scene.responses.headers}
    assert {"x", "vary", "content-type"} <= names
    assert names.isdisjoint(("x-hop", "connection"))
