"""Keyed, noted and passed headers: which decide, which are read, and which just pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.proxy.calls.planner import Planner
from gateway.proxy.filters.authentication import KeyGroup
from gateway.proxy.router import Route, Router
from gateway.routing.balancer import LoadBalancingPolicy
from gateway.routing.matcher import Match, Pattern
from gateway.upstream.pool.pool import Pool
from tests.proxy.calls.scene import Scene, binary_response, plan_of, start
from tests.support.doubles.fast_path import ReadyEndpoint, ScriptedClient, response_head
from tests.support.doubles.streaming import make_destination, single_destination
from tests.support.inference_messages import FLOATS, INFER

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
    fast_path = Planner(_router("X-Kind", dropped=dropped)[0])
    plans = [
        plan_of(fast_path, method, target, headers)
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
    assert plan_of(fast_path, method, target, {"x-kind": "yes"}) is not plans[0]
    fast_path.close()


@pytest.mark.parametrize("dropped", [frozenset[str](), ALL_NOTED], ids=["passed", "replaced"])
@pytest.mark.parametrize("name", ["X-Request-Id", "Forwarded"])
async def test_route_can_match_a_noted_header(name: str, dropped: frozenset[str]) -> None:
    router, chosen = _router(name, dropped=dropped)
    fast_path = Planner(router)
    for value, times in [("no", 0), ("yes", 1), ("no", 1), ("yes", 2)]:
        headers = {name: value, "X-A": "1"}
        assert start(fast_path, "GET", "/v2/x", headers, b"", ScriptedClient()) is not None
        assert len(chosen.asked) == times
    expected = {"Host": "h", "X-A": "1", **({} if dropped else {name: "yes"})}
    for asked in chosen.asked:
        assert sorted(asked.lines) == sorted(expected.items())
    fast_path.close()


@pytest.mark.parametrize("header", ["X-Key", "X-Request-Id", None])
async def test_plan_of_an_authenticated_client_is_for_its_key_only(header: str | None) -> None:
    group = KeyGroup("g", header, ["secret"])
    name = group.header_name
    dropped = ALL_NOTED | {name.lower()}
    route = Route(
        Match(), (make_destination(ReadyEndpoint()),), keys=(group,), dropped_headers=dropped
    )
    fast_path = Planner(Router([route]))
    key = "secret" if header else "Bearer secret"
    assert plan_of(fast_path, "GET", "/v2/x", {name: key}) is not None
    for headers in ({}, {name: "other"}, {name: f"{key}x"}):
        assert plan_of(fast_path, "GET", "/v2/x", headers) is None
    fast_path.close()


async def test_plan_of_an_open_route_is_not_for_a_client_with_a_key() -> None:
    """Its Authorization may hold a key of a group with another header, which no server may get."""
    group = KeyGroup("g", "X-Key", ["secret"])
    endpoint = ReadyEndpoint()
    to = (make_destination(endpoint),)
    routes = [Route(Match(model=Pattern.of("m")), to, keys=(group,)), Route(Match(), to)]
    fast_path = Planner(Router(routes))
    for value in ("Bearer of-the-server", "Bearer secret"):
        headers = {"Authorization": value}
        assert start(fast_path, "GET", "/v2/x", headers, b"", ScriptedClient()) is not None
    passed, withheld = (dict(asked.lines) for asked in endpoint.asked)
    assert passed["Authorization"] == "Bearer of-the-server"
    assert "Authorization" not in withheld
    fast_path.close()


@pytest.mark.parametrize("header", ["X-User", "X-Forwarded-For"])
async def test_hash_header_chooses_the_endpoint(header: str) -> None:
    """A client's header counts, too, that the gateway replaces only if it is set to do so."""
    endpoints = [ReadyEndpoint(url=f"http://{number}") for number in range(4)]
    destination = make_destination(*endpoints)
    pool = Pool(endpoints, load_balancing=LoadBalancingPolicy(hash_header=header))
    upstream = replace(destination.upstream, pool=pool)
    fast_path = Planner(single_destination(replace(destination, upstream=upstream)))
    for user in range(20):
        before = [len(each.asked) for each in endpoints]
        for _ in range(4):
            headers = {header: str(user)}
            assert start(fast_path, "GET", "/v2/x", headers, b"", ScriptedClient()) is not None
        grown = [len(each.asked) - old for each, old in zip(endpoints, before, strict=True)]
        assert sorted(grown) == [0, 0, 0, 4]
    assert min(len(each.asked) for each in endpoints) > 0
    fast_path.close()


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
    headers |= {"Connection": "close, x-HOP", "X-Hop": "1", "Vary": "*", "X": "2"}
    scene.receiver.on_complete(response_head(headers=headers), body)
    names = {name.lower() for name, _ in scene.responses.headers}
    assert {"x", "vary", "content-type"} <= names
    assert names.isdisjoint(("x-hop", "connection"))


async def test_connection_cannot_drop_the_type_of_a_response() -> None:
    scene = Scene()
    scene.get()
    headers = {"Connection": "Content-Type", "Content-Type": "x/y"}
    scene.receiver.on_complete(response_head(headers=headers), b"")
    assert scene.responses.headers == (("Content-Type", "x/y"),)
