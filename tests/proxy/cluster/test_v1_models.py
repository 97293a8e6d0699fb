from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, Dialect
from gateway.protocol.operations import KINDS
from gateway.proxy.cluster.scatter_gather import FAILED
from gateway.proxy.router import Routes, Rule
from gateway.routing.matcher import Match
from tests.support.doubles.cluster import (
    A,
    B,
    Turn,
    UnknownSpeech,
    ask,
    asked,
    says,
    servers,
    unreachable,
)
from tests.support.doubles.streaming import only, route_to

MODEL = "/v1/models/m"
MODELS = "/v1/models"
READY = "GET /v2/models/m/ready"
INDEX = "POST /v2/repository/index"


@pytest.mark.parametrize("body", [b"", b'{"name":"m","ready":true}'])
async def test_a_model_that_is_ready(body: bytes) -> None:
    (a,) = servers(a=says(body))
    answer = await ask(only(route_to(a)), "GET", MODEL)
    assert (answer.status, answer.body) == (200, b'{"name":"m","ready":true}')
    assert answer.headers["Content-Type"] == "application/json"
    assert asked(a) == [[READY]]


async def test_a_version_that_is_ready() -> None:
    (a,) = servers(a=says(b""))
    answer = await ask(only(route_to(a)), "GET", MODEL + "/versions/2")
    assert answer.status == 200
    assert asked(a) == [["GET /v2/models/m/versions/2/ready"]]


@pytest.mark.parametrize("turn", [says(b"", 400), says(b'{"ready":false}')])
async def test_a_model_that_is_not_ready(turn: object) -> None:
    (a,) = servers(a=(turn, says(b'{"name":"m"}')))  # type: ignore[arg-type]
    answer = await ask(only(route_to(a)), "GET", MODEL)
    assert (answer.status, answer.body) == (503, b'{"error":"model \'m\' is not ready"}')
    assert asked(a) == [[READY, "GET /v2/models/m"]]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error":"unknown"}', b'{"error":"unknown"}'),
        (b'{"detail":"unknown"}', b'{"error":"unknown"}'),
        (b"", b'{"error":"Scripted"}'),
    ],
)
async def test_a_model_that_a_server_does_not_have(body: bytes, told: bytes) -> None:
    (a,) = servers(a=(says(b"", 400), says(body, 404)))
    answer = await ask(only(route_to(a)), "GET", MODEL)
    assert (answer.status, answer.body) == (404, told)


async def test_a_server_that_cannot_be_reached() -> None:
    (a,) = servers(a=unreachable(A))
    answer = await ask(only(route_to(a)), "GET", MODEL)
    assert answer.status == 503
    assert A in json.loads(answer.body)["error"]


async def test_a_server_that_speaks_v1_is_asked_as_it_is() -> None:
    (a,) = servers(a=says(b'{"name":"m","ready":"True"}'))
    answer = await ask(only(route_to(a, dialect=KSERVE)), "GET", MODEL)
    assert answer.body == b'{"name":"m","ready":"True"}'
    assert asked(a) == [["GET " + MODEL]]


async def test_a_version_where_the_server_has_none() -> None:
    (a,) = servers(a=says(b"{}"))
    answer = await ask(only(route_to(a, dialect=KSERVE)), "GET", MODEL + "/versions/1")
    assert answer.status == 501
    assert f"without one, this is {MODEL}" in json.loads(answer.body)["error"]
    assert asked(a) == [[]]


async def test_the_models_of_one_server() -> None:
    index = [{"name": "b", "state": "READY"}, {"name": "a", "state": "UNAVAILABLE"}, {"name": "c"}]
    (a,) = servers(a=says(json.dumps(index).encode()))
    answer = await ask(only(route_to(a)), "GET", MODELS)
    assert (answer.status, answer.body) == (200, b'{"models":["b","c"]}')
    assert asked(a) == [[INDEX]]
    assert a.bodies == [b'{"ready":true}']


def by_model(*routes: object) -> Routes:
    return Routes([Rule(Match(), (route,)) for route in routes])  # type: ignore[arg-type]


async def test_the_models_of_all_upstreams() -> None:
    a, b, c = servers(
        a=says(b'[{"name":"x","version":"1"},{"name":"x","version":"2"},{"name":"y"}]'),
        b=says(b'{"models":["y","z"]}'),
        c=says(b"[]"),
    )
    routes = by_model(
        route_to(a, name="a"), route_to(b, name="b", dialect=KSERVE), route_to(c, name="c")
    )
    answer = await ask(routes, "GET", MODELS)
    assert answer.status == 200
    assert sorted(json.loads(answer.body)["models"]) == ["x", "y", "z"]
    assert asked(a, b, c) == [[INDEX], ["GET " + MODELS], [INDEX]]


async def test_a_rule_that_denies_the_list_leaves_its_models_out() -> None:
    a, b = servers(a=says(b'[{"name":"x"}]'), b=())
    denied = Rule(Match(), (route_to(b, name="b"),), deny=KINDS["repository"])
    routes = Routes([Rule(Match(), (route_to(a, name="a"),)), denied])
    answer = await ask(routes, "GET", MODELS)
    assert json.loads(answer.body) == {"models": ["x"]}
    refused = await ask(Routes([denied]), "GET", MODELS)
    assert refused.status == 403
    assert asked(b) == [[]]


async def test_a_list_that_one_upstream_does_not_give() -> None:
    a, b = servers(a=says(b"[]"), b=says(b"no", 500))
    answer = await ask(by_model(route_to(a, name="a"), route_to(b, name="b")), "GET", MODELS)
    assert answer.status == 502
    error = json.loads(answer.body)["error"]
    assert "upstream b answered 500: no" in error


OF_OPENAI = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 501])
async def test_a_server_without_an_index_gets_the_request_as_it_is(status: int) -> None:
    (a,) = servers(a=(says(b"no", status), says(OF_OPENAI, headers={"X": "1"})))
    answer = await ask(only(route_to(a)), "GET", MODELS + "?x=1", headers={"Y": "2"})
    assert (answer.status, answer.body, answer.headers["X"]) == (200, OF_OPENAI, "1")
    assert asked(a) == [[INDEX, "GET " + MODELS + "?x=1"]]
    assert a.requests[-1].headers["Y"] == "2"
    assert a.bodies[-1] == b""


async def test_a_server_without_any_list_says_so_itself() -> None:
    (a,) = servers(a=(says(b"", 404), says(b"<p>not here", 404)))
    answer = await ask(only(route_to(a)), "GET", MODELS)
    assert (answer.status, answer.body) == (404, b"<p>not here")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_an_index_that_fails_is_still_one(status: int) -> None:
    (a,) = servers(a=says(b"not now", status))
    answer = await ask(only(route_to(a)), "GET", MODELS)
    assert (answer.status, answer.body) == (status, b'{"error":"not now"}')
    assert asked(a) == [[INDEX]]


async def test_one_of_the_endpoints_is_asked_for_the_list_of_another_kind() -> None:
    a, b = servers(a=says(b"", 404), b=says(OF_OPENAI))
    answer = await ask(only(route_to(a, b)), "GET", MODELS)
    assert answer.body == OF_OPENAI
    assert asked(a, b) == [[INDEX], ["GET " + MODELS]]  # in turn


async def test_where_there_are_several_upstreams_a_list_is_that_of_all() -> None:
    a, b = servers(a=says(b"none", 404), b=says(b"none", 404))
    routes = by_model(route_to(a, name="a"), route_to(b, name="b"))
    answer = await ask(routes, "GET", MODELS)
    assert (answer.status, answer.body) == (404, b'{"error":"none"}')
    assert FAILED not in answer.headers
    assert asked(a, b) == [[INDEX], [INDEX]]


@pytest.mark.parametrize("body", [b"no", b"5", b'{"models":5}', b"[1]"])
async def test_what_is_no_list(body: bytes) -> None:
    (a,) = servers(a=says(body))
    answer = await ask(only(route_to(a)), "GET", MODELS)
    assert answer.status == 502
    assert "did not answer with a list of models" in json.loads(answer.body)["error"]


LACKING: dict[str, tuple[Dialect, Turn, str]] = {
    "no index": (JSON, says(b"none", 404), INDEX),
    "no path of the kind": (OPENVINO, says(b"none", 400), INDEX),
    "no list of V1": (KSERVE, says(b"none", 404), "GET " + MODELS),
}


@pytest.mark.parametrize(("dialect", "turn", "question"), LACKING.values(), ids=LACKING)
async def test_who_has_no_list_is_left_out_and_named(
    dialect: Dialect, turn: Turn, question: str
) -> None:
    a, b = servers(a=says(b'[{"name":"x"}]'), b=turn)
    routes = by_model(route_to(a, name="a"), route_to(b, name="b", dialect=dialect))
    answer = await ask(routes, "GET", MODELS)
    assert (answer.status, answer.body) == (200, b'{"models":["x"]}')
    assert answer.headers[FAILED] == "upstream b"
    assert asked(a, b) == [[INDEX], [question]]


@pytest.mark.parametrize("status", [400, 401, 403, 422, 503])
async def test_who_may_have_a_list_is_not_left_out(status: int) -> None:
    a, b = servers(a=says(b'[{"name":"x"}]'), b=says(b"no", status))
    answer = await ask(by_model(route_to(a, name="a"), route_to(b, name="b")), "GET", MODELS)
    assert answer.status == 502
    assert f"upstream b answered {status}: no" in json.loads(answer.body)["error"]


@pytest.mark.parametrize("target", [MODEL, MODELS])
async def test_who_asks_for_models_waits_until_it_is_known_how_servers_speak(target: str) -> None:
    (a,) = servers(a=says(b'{"models":["m"]}'))
    route = route_to(a)
    upstream = replace(route.upstream, speech=UnknownSpeech(KSERVE, None))
    answer = await ask(only(replace(route, upstream=upstream)), "GET", target)
    assert answer.status == 200
    assert asked(a) == [["GET " + target]]


@pytest.mark.parametrize(("target", "question"), [(MODEL, []), (MODELS, [INDEX])])
async def test_a_server_that_is_down_does_not_tell_how_it_speaks(
    target: str, question: list[str]
) -> None:
    (a,) = servers(a=unreachable(A))
    route = route_to(a)
    upstream = replace(route.upstream, speech=UnknownSpeech(KSERVE, unreachable(A)))
    answer = await ask(only(replace(route, upstream=upstream)), "GET", target)
    assert answer.status == 503
    assert f"cannot connect to {A}" in json.loads(answer.body)["error"]
    assert asked(a) == [question]


async def test_one_of_several_that_is_down_is_named() -> None:
    a, b = servers(a=says(b'[{"name":"x"}]'), b=unreachable(B))
    down = route_to(b, name="b")
    upstream = replace(down.upstream, speech=UnknownSpeech(KSERVE, unreachable(B)))
    routes = by_model(route_to(a, name="a"), replace(down, upstream=upstream))
    answer = await ask(routes, "GET", MODELS)
    assert (answer.status, json.loads(answer.body)["error"]) == (
        502,
        f"GET {MODELS} went well at upstream a, but failed: "
        f"upstream b: cannot connect to {B}: Connection refused",
    )
