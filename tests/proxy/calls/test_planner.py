"""Which requests take the fast path, and how they are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from multidict import CIMultiDict

from gateway.codec.v2.buffered_request import MAX_FAST_REQUEST
from gateway.http1.head import MAX_CACHED_HEAD
from gateway.protocol.dialects import DIALECTS
from gateway.proxy.calls.buffered import CallPlan
from gateway.proxy.calls.planner import FastPath
from gateway.proxy.destination import Destination
from gateway.proxy.response_headers import ResponseHeaderPolicy
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from gateway.sizes import CONVERT_CHUNK, MAX_UNSCHEDULED
from gateway.upstream.pool.model_discovery import ModelDiscovery
from gateway.upstream.pool.supervisor import PoolSupervisor
from gateway.upstream.transport import (
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
)
from tests.proxy.calls.scene import (
    BINARY,
    JSON,
    Scene,
    make_plan,
    plan_of,
    start,
    template_of,
)
from tests.support.compiled import needs_source
from tests.support.doubles.fast_path import (
    ReadyEndpoint,
    ScriptedClient,
    client_head,
    response_head,
)
from tests.support.doubles.streaming import (
    LIMITS,
    make_destination,
    ready,
    single_destination,
)
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    json_request,
)

PREDICT = "/v1/models/m:predict"
JSON_TYPE = {"Content-Type": "application/json"}

FLOODS: dict[str, tuple[str, str]] = {
    "heads": (INFER, "host-{}"),
    "models": ("/v2/models/m{}/infer", "h"),
    "queries": (INFER + "?{}", "h"),
    "paths": ("/x{}", "h"),
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
    "GET with a query": ("GET", "/v2/models/m/stats?x=%20", {}, 0),
    "GET with a body": ("GET", "/v2/x", {}, 5),
    "GET with an empty body": ("GET", "/v2/x", {"Content-Length": "0"}, 0),
    "GET where POST infers": ("GET", INFER, {}, 0),
    "POST": ("POST", "/v2/models/m/generate", {}, 5),
    "POST with an empty body": ("POST", "/v2/x", {"Content-Length": "0"}, 0),
    "POST to where the metadata is": ("POST", "/v2", {}, 5),
    "PUT": ("PUT", "/v2/x", {}, 5),
    "DELETE with an empty body": ("DELETE", "/v2/x", {"Content-Length": "0"}, 0),
    "compressed": ("POST", "/v2/x", {"Content-Encoding": "gzip"}, 5),
    "said not to be compressed": ("POST", "/v2/x", {"Content-Encoding": "identity"}, 5),
    "with tensors": ("POST", "/v2/x", {HEADER_LENGTH: "5"}, 9),
    "no path of the protocol": ("GET", "/", {}, 0),
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
    "JSON": (INFER, {}, 10),
    "a version and a query": ("/v2/models/m/versions/2/infer?x=1", {}, 10),
    "one byte": (INFER, {}, 1),
    "all that a header may have": (INFER, {}, LIMITS.max_inference_header_bytes),
    "said to be something": (INFER, {"Content-Type": "text/plain"}, 10),
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
    "HEAD of an infer path": ("HEAD", INFER, {}),
    "GET that waits to be told": ("GET", "/v2/x", {"Expect": "100-continue"}),
    "POST that waits to be told": ("POST", "/v2/x", {"expect": "100-Continue"}),
    "infer that waits to be told": ("POST", INFER, {"Expect": "100-continue"}),
    "another expectation": ("POST", "/v2/x", {"Expect": "more"}),
    "a header for the gateway only": ("POST", "/v2/x", {"Connection": "close, X-Hop"}),
    "no header length": ("POST", INFER, {HEADER_LENGTH: ""}),
    "gzip": ("POST", INFER, {"Content-Encoding": "gzip"}),
    "generate, compressed": ("POST", "/v2/models/m/generate", {"Content-Encoding": "gzip"}),
    "an unknown coding": ("POST", INFER, {"content-encoding": "X"}),
    "said not to be compressed": ("POST", INFER, {"Content-Encoding": " Identity "}),
    "an empty coding": ("POST", "/v2/models/m/generate", {"Content-Encoding": ""}),
    "server metadata": ("GET", "/v2", {}),
    "server metadata with a slash": ("GET", "/v2/?x", {}),
    "trace settings": ("GET", "/v2/trace/setting", {}),
    "trace settings of a model": ("POST", "/v2/models/m/trace", {}),
    "load": ("POST", "/v2/repository/models/m/load", {}),
    "unload": ("POST", "/v2/repository/models/m/unload", {"Content-Length": "0"}),
    "liveness": ("GET", "/v2/health/live", {}),
    "readiness": ("GET", "/v2/health/ready?x", {}),
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
        ("POST", INFER, {"Content-Length": "0"}),
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


async def test_index_has_a_plan_if_there_is_one_upstream() -> None:
    def plan(*router: Destination) -> CallPlan | None:
        routes = Router([Route(Match(), router, (1,) * len(router))])
        return plan_of(FastPath(routes), "POST", "/v2/repository/index", {"Content-Length": "0"})

    one, two = make_destination(ReadyEndpoint()), make_destination(ReadyEndpoint(), name="two")
    several = make_destination(ReadyEndpoint(url="http://a"), ReadyEndpoint(url="http://b"))
    assert plan(one) is not None
    assert plan(one, two) is None
    assert plan(several) is not None  # servers of one upstream have the same models


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/v2/models/stats"),
        ("GET", "/v2/logging"),
        ("POST", "/v2/models/m/trace/setting"),
        ("POST", "/v2/repository/models/m/load"),
    ],
)
async def test_operation_of_operators_has_no_plan(method: str, target: str) -> None:
    routes = Router([Route(Match(), (make_destination(ReadyEndpoint()),))])
    assert plan_of(FastPath(routes), method, target, {"Content-Length": "0"}) is None


@pytest.mark.parametrize(
    ("target", "length", "limits", "on_fast_path"),
    [
        ("/v2/x", 1000, {"max_request_bytes": 1000}, True),
        ("/v2/x", 1001, {"max_request_bytes": 1000}, False),
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


@pytest.mark.parametrize(("method", "length"), [("POST", 5), ("GET", 5), ("PUT", 9)])
@pytest.mark.parametrize("options", ["Content-Length", "close, content-length"])
async def test_body_is_never_sent_without_its_length(
    method: str, length: int, options: str
) -> None:
    """The client must not choose what the server takes for the next request."""
    scene = Scene()
    assert scene.start(method, "/v2/x", bytes(length), {"Connection": options}) is not None
    assert CIMultiDict(scene.asked.lines).getall("Content-Length", []) == [str(length)]


# ----------------------------------------------------------------------------------------- requests


async def test_json_request_is_converted_and_sent() -> None:
    scene = Scene()
    scene.infer()
    size = int(dict(scene.asked.headers)[HEADER_LENGTH])
    fields = json.loads(scene.asked.body[:size])
    assert fields["inputs"] == [
        {
            "name": "IN",
            "shape": [3],
            "datatype": "FP32",
            "parameters": {"binary_data_size": 12},
        }
    ]
    assert fields["parameters"] == {"binary_data_output": True}
    assert scene.asked.body[size:] == FLOATS.tobytes()
    assert dict(scene.asked.lines) == {
        "Host": "h",
        **BINARY,
        "Content-Length": str(len(scene.asked.body)),
        HEADER_LENGTH: str(size),
    }
    assert len(scene.asked.lines) == 4
    assert scene.log == [f"server is asked POST {INFER}"]


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


async def test_requests_of_one_plan_share_their_template() -> None:
    scene = Scene()
    for body in (JSON, json_request(1, 2)):
        assert scene.start(body=body) is not None
    first, second = scene.endpoint.asked
    assert first.start is second.start
    assert first.body != second.body


INVALID = {
    "no JSON": b"what?",
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


class _FailingConnection(ReservedConnection):
    """Fails after a part of the request may have been sent."""

    def send(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        receiver: ResponseReceiver,
    ) -> None:
        raise ZeroDivisionError

    def close(self) -> None:
        pass


async def test_request_is_not_sent_again_after_an_unexpected_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(ReadyEndpoint):
        def try_reserve(self) -> ReservedConnection | None:
            return _FailingConnection()

    destination, client = make_destination(Failing()), ScriptedClient()
    fast_path = FastPath(single_destination(destination))
    assert start(fast_path, "GET", "/v2/x", {}, b"", client) is not None
    assert destination.upstream.pool.outstanding == [1]
    await asyncio.sleep(0)
    assert [(each.status, each.last) for each in client.responses] == [(500, True)]
    assert destination.upstream.pool.outstanding == [0]
    assert destination.memory_budget.total == 0
    assert "ZeroDivisionError" in caplog.text
    fast_path.close()


@needs_source
async def test_nothing_is_converted_before_a_connection_is_reserved() -> None:
    scene = Scene()
    scene.endpoint.ready = False
    head = client_head("POST", INFER, {}, scene.fast_path.keyed_headers)
    plan = scene.fast_path.plan(head, INFER)
    assert isinstance(plan, CallPlan)
    handler = mock.Mock(is_grpc=False)
    plan = replace(plan, handler=handler)
    assert scene.fast_path.prepare(plan, head, JSON, scene.client) is None
    handler.to_server.assert_not_called()
    assert scene.outstanding == 0


async def test_least_busy_endpoint_gets_the_request() -> None:
    one, two = ReadyEndpoint(url="http://one"), ReadyEndpoint(url="http://two")
    destination = make_destination(one, two)
    fast_path = FastPath(single_destination(destination))
    for _ in range(4):
        assert start(fast_path, "GET", "/v2/x", {}, b"", ScriptedClient()) is not None
    assert [len(one.asked), len(two.asked)] == [2, 2]
    one.asked[0].receiver.on_complete(response_head(), b"")
    assert destination.upstream.pool.outstanding == [1, 2]
    for _ in range(2):
        assert start(fast_path, "GET", "/v2/x", {}, b"", ScriptedClient()) is not None
    assert destination.upstream.pool.outstanding in ([3, 2], [2, 3])
    fast_path.close()


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
        ("/v2/models/m/generate", FORM, True),
        ("/v1/models/m:explain", FORM, True),
        ("/other", FORM, False),
        ("/v2/models/m/generate", {"Content-Type": "application/json"}, False),
    ],
    ids=["no type", "curl's form", "curl's form for V1", "a form elsewhere", "JSON"],
)
async def test_form_counts_as_no_content_type_on_inference_paths(
    target: str, headers: dict[str, str], is_untyped: bool
) -> None:
    plan = make_plan("POST", target, {"Host": "h", **headers})
    assert plan is not None
    assert plan.is_untyped is is_untyped
