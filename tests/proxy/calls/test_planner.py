"""Which requests take the fast path, and how they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.codec.v2.buffered_request import MAX_FAST_REQUEST
from gateway.http1.head import MAX_CACHED_HEAD
from gateway.protocol.dialects import DIALECTS
from gateway.proxy.calls.planner import FastPath
from gateway.proxy.response_headers import ResponseHeaderPolicy
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from gateway.sizes import CONVERT_CHUNK, MAX_UNSCHEDULED
from gateway.upstream.pool.checks import ModelDiscovery, PoolSupervisor
from gateway.upstream.transport import ReservedConnection
from tests.proxy.calls.scene import BINARY, JSON, Scene, make_plan, plan_of, start, template_of
from tests.support.doubles.fast_path import ReadyEndpoint, ScriptedClient
from tests.support.doubles.streaming import LIMITS, make_destination, ready, single_destination
from tests.support.inference_messages import HEADER_LENGTH, INFER

PREDICT = "/v1/models/m:predict"
JSON_TYPE = {"Content-Type": "application/json"}

FLOODS: dict[str, tuple[str, str]] = {
    "heads": (INFER, "host-{}"),
    "models": ("/v2/models/m{}/infer", "h"),
}


@pytest.mark.parametrize(("target", "host"), FLOODS.values(), ids=FLOODS)
async def test_plans_are_still_found_after_a_flood_of_other_heads(target: str, host: str) -> None:
    fast_path = FastPath(single_destination(make_destination(ReadyEndpoint())))
    innocents = [(INFER, JSON_TYPE), (PREDICT, JSON_TYPE), ("/v2/models/m/stats", {})]
    before = [plan_of(fast_path, "POST", *each) for each in innocents]
    assert None not in before
    for number in range(5000):
        headers = {**JSON_TYPE, "Host": host.format(number)}
        assert plan_of(fast_path, "POST", target.format(number), headers) is not None
    after = [plan_of(fast_path, "POST", *each) for each in innocents]
    assert all(one is other for one, other in zip(before, after, strict=True))
    fast_path.close()


PASSTHROUGH: dict[str, tuple[str, str, dict[str, str], int]] = {
    "GET": ("GET", "/v2/models/m/ready", {}, 0),
    "GET with a body": ("GET", "/v2/x", {}, 5),
    "POST with an empty body": ("POST", "/v2/x", {"Content-Length": "0"}, 0),
    "DELETE with an empty body": ("DELETE", "/v2/x", {"Content-Length": "0"}, 0),
    "compressed": ("POST", "/v2/x", {"Content-Encoding": "gzip"}, 5),
    "with tensors": ("POST", "/v2/x", {HEADER_LENGTH: "5"}, 9),
    "the largest": ("POST", "/v2/x", {}, CONVERT_CHUNK),
}


@pytest.mark.parametrize(
    ("method", "target", "headers", "length"), PASSTHROUGH.values(), ids=PASSTHROUGH
)
async def test_passthrough_request_has_a_plan(
    method: str, target: str, headers: dict[str, str], length: int
) -> None:
    headers = {"Host": "h", "X-A": "1", **headers}
    plan = make_plan(method, target, headers)
    assert plan is not None
    assert not plan.converts
    scene = Scene()
    assert plan.max_size >= length
    assert scene.start(method, target, bytes(length), headers) is not None
    assert (scene.asked.start.method, scene.asked.start.target) == (method, target)
    assert scene.asked.body == bytes(length)
    sized = {"Content-Length": str(length)} if length else {}
    assert sorted(scene.asked.lines) == sorted({**headers, **sized}.items())


CONVERTED: dict[str, tuple[str, dict[str, str], int]] = {
    "a version and a query": ("/v2/models/m/versions/2/infer?x=1", {}, 10),
    "said to be binary": (INFER, BINARY, 10),
    "with tensors": (INFER, {HEADER_LENGTH: "10"}, 22),
    "raw binary": (INFER, {HEADER_LENGTH: "0"}, 12),
}


@pytest.mark.parametrize(("target", "headers", "length"), CONVERTED.values(), ids=CONVERTED)
async def test_infer_request_has_a_plan(target: str, headers: dict[str, str], length: int) -> None:
    plan = make_plan("POST", target, {"Host": "h", **headers})
    assert plan is not None
    assert plan.converts
    assert plan.max_size >= length
    assert (template_of(plan).method, template_of(plan).target) == ("POST", target)
    changed = ("Content-Type", HEADER_LENGTH)
    kept = {name: value for name, value in headers.items() if name not in changed}
    assert dict(template_of(plan).headers) == {"Host": "h", **kept, **BINARY}
    assert len(template_of(plan).headers) == len({"Host", *kept, *BINARY})


STREAMED: dict[str, tuple[str, str, dict[str, str]]] = {
    "HEAD": ("HEAD", "/v2/x", {}),
    "GET that waits to be told": ("GET", "/v2/x", {"Expect": "100-continue"}),
    "another expectation": ("POST", "/v2/x", {"Expect": "more"}),
    "a header for the gateway only": ("POST", "/v2/x", {"Connection": "close, X-Hop"}),
    "no header length": ("POST", INFER, {HEADER_LENGTH: ""}),
    "gzip": ("POST", INFER, {"Content-Encoding": "gzip"}),
    "an unknown coding": ("POST", INFER, {"content-encoding": "X"}),
    "server metadata": ("GET", "/v2", {}),
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
        (INFER, 1000, {"max_request_bytes": 1000}, True),
        (INFER, 1001, {"max_request_bytes": 1000}, False),
        (INFER, 1000, {"max_inference_header_bytes": 1000}, True),
        (INFER, 1001, {"max_inference_header_bytes": 1000}, False),
        (INFER, MAX_FAST_REQUEST, {"max_inference_header_bytes": 10 * CONVERT_CHUNK}, True),
        (INFER, MAX_FAST_REQUEST + 1, {"max_inference_header_bytes": 10 * CONVERT_CHUNK}, False),
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


HOP_BY_HOP = [
    ("Connection", "keep-alive, close"),
    ("connection", ""),
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Connection", "keep-alive"),
    ("Proxy-Authorization", "Basic eA=="),
    ("TE", "trailers"),
    ("Trailer", "X-T"),
    ("Upgrade", "h2c"),
]
END_TO_END = [
    ("X-Two", "a"),
    ("x-two", "b"),
    ("Cookie", "c=d"),
    ("Authorization", "Bearer t"),
    ("X-Latin", "caf\xe9"),
]


async def test_hop_by_hop_headers_are_dropped() -> None:
    scene = Scene()
    headers = [("Host", "h"), *END_TO_END, ("Accept-Encoding", "gzip")]
    assert scene.start("POST", "/v2/x", b"hello", [*HOP_BY_HOP, *headers]) is not None
    assert sorted(scene.asked.lines) == sorted([*headers, ("Content-Length", "5")])
    assert scene.start(headers=[*HOP_BY_HOP, *headers]) is not None
    sizes = [pair for pair in scene.asked.lines if pair[0] in ("Content-Length", HEADER_LENGTH)]
    expected = [("Host", "h"), *END_TO_END, *BINARY.items(), *sizes]
    assert len(sizes) == 2
    assert sorted(scene.asked.lines) == sorted(expected)


async def test_converted_request_asks_for_no_compressed_response() -> None:
    wishes = [("Accept-Encoding", "gzip"), ("accept-encoding", "br"), ("Accept", "x/y")]
    scene = Scene()
    assert scene.start(headers=wishes) is not None
    assert ("Accept", "x/y") in scene.asked.lines
    assert "accept-encoding" not in {name.lower() for name, _ in scene.asked.lines}


@pytest.mark.parametrize(
    ("accepted", "on_fast_path"),
    [("", True), ("br", True), ("gzip;q=0", True), ("br, gzip", False)],
)
@pytest.mark.parametrize("target", [INFER, "/v2/x"])
async def test_response_to_be_compressed_takes_the_streaming_path(
    target: str, accepted: str, on_fast_path: bool
) -> None:
    router = Router([Route(Match(), (make_destination(ReadyEndpoint()),), codings=("gzip",))])
    headers = {"Accept-Encoding": accepted} if accepted else {}
    plan = plan_of(FastPath(router), "POST", target, headers)
    assert (plan is not None) is on_fast_path
    if plan is not None:
        assert plan.header_policy == ResponseHeaderPolicy(adds_vary=True)
        assert "Accept-Encoding" not in dict(template_of(plan).headers)


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


INVALID = {
    "does not fit": JSON.replace(b"1.5", b"1e99"),
    "nested too deep": b'{"inputs":[],"x":' + b"[" * 70 + b"]" * 70 + b"}",
}


@pytest.mark.parametrize("body", INVALID.values(), ids=INVALID)
async def test_invalid_request_takes_the_streaming_path(body: bytes) -> None:
    scene = Scene()
    assert scene.start(body=body) is None
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


async def test_request_takes_the_streaming_path_if_the_transport_can_only_stream() -> None:
    class Slow(ReadyEndpoint):
        def try_reserve(self) -> ReservedConnection | None:
            return super(ReadyEndpoint, self).try_reserve()

    destination = make_destination(Slow())
    fast_path = FastPath(single_destination(destination))
    assert start(fast_path, "GET", "/v2/x", {}, b"", ScriptedClient()) is None
    assert destination.upstream.pool.outstanding == [0]


@pytest.mark.parametrize(
    ("method", "target", "body", "models"),
    [
        ("POST", INFER, JSON, "nmo"),
        ("GET", "/v2/models/m", b"", "nmo"),
        ("GET", "/v2/models/m/versions/2", b"", ("m/1", "m/2", "m/3")),
    ],
)
async def test_request_goes_to_an_endpoint_that_has_its_model(
    method: str, target: str, body: bytes, models: Sequence[str]
) -> None:
    endpoints = [ReadyEndpoint(url=f"http://{number}") for number in range(3)]
    destination = make_destination(
        *endpoints, supervisor=PoolSupervisor(model_discovery=ModelDiscovery(60))
    )
    for member, model in zip(destination.upstream.pool.members, models, strict=True):
        member.models = ready(model)
    fast_path = FastPath(single_destination(destination))
    for _ in range(4):
        assert start(fast_path, method, target, {}, body, ScriptedClient()) is not None
    assert [len(each.asked) for each in endpoints] == [0, 4, 0]
    fast_path.close()


async def test_upstream_without_endpoints_takes_the_streaming_path() -> None:
    destination = make_destination(ReadyEndpoint())
    fast_path = FastPath(single_destination(destination))
    destination.upstream.pool.set_endpoints([])
    assert start(fast_path, "GET", "/v2/x", {}, b"", ScriptedClient()) is None
    await destination.upstream.pool.close()


def test_no_dialect_refuses_a_head_part_that_the_fast_path_takes() -> None:
    limits = [dialect.max_head_part for dialect in DIALECTS.values()]
    assert all(limit is None or limit >= MAX_CACHED_HEAD for limit in limits)


FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("target", "headers", "is_untyped"),
    [
        ("/v2/models/m/generate", {}, True),
        ("/v1/models/m:explain", FORM, True),
        ("/other", FORM, False),
    ],
    ids=["no type", "curl's form for V1", "a form elsewhere"],
)
async def test_form_counts_as_no_content_type_on_inference_paths(
    target: str, headers: dict[str, str], is_untyped: bool
) -> None:
    plan = make_plan("POST", target, {"Host": "h", **headers})
    assert plan is not None
    assert plan.is_untyped is is_untyped
