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

from gateway.codec.v2.fast_request import MAX_FAST_REQUEST
from gateway.protocol.dialects import DIALECTS
from gateway.proxy.admission.conversion_scheduler import MAX_UNSCHEDULED
from gateway.proxy.fast_path.call import CallPlan
from gateway.proxy.fast_path.planner import LONG_HEAD_PART, FastPath
from gateway.proxy.interfaces import Destination
from gateway.proxy.response_headers import ResponseHeaderPolicy
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from gateway.sizes import CONVERT_CHUNK
from gateway.upstream.pool.model_discovery import ModelDiscovery
from gateway.upstream.pool.supervisor import PoolSupervisor
from gateway.upstream.transport import (
    HeaderLines,
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
)
from tests.proxy.fast_path.scene import (
    BINARY,
    JSON,
    Scene,
    make_headers,
    make_plan,
    template_of,
)
from tests.support.doubles.fast_path import (
    ReadyEndpoint,
    ScriptedClient,
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
    plan = make_plan(method, target, {"Host": "h", "X-A": "1", **headers}, length)
    assert plan is not None
    assert not plan.converts
    assert (template_of(plan).method, template_of(plan).target) == (method, target)
    sized = {"Content-Length": str(length)} if length else {}
    assert template_of(plan).headers == tuple({"Host": "h", "X-A": "1", **headers, **sized}.items())


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
    plan = make_plan("POST", target, {"Host": "h", **headers}, length)
    assert plan is not None
    assert plan.converts
    assert (template_of(plan).method, template_of(plan).target) == ("POST", target)
    changed = ("Content-Type", HEADER_LENGTH)
    kept = {name: value for name, value in headers.items() if name not in changed}
    assert dict(template_of(plan).headers) == {"Host": "h", **kept, **BINARY}
    assert len(template_of(plan).headers) == len({"Host", *kept, *BINARY})


STREAMED: dict[str, tuple[str, str, dict[str, str], int]] = {
    "HEAD": ("HEAD", "/v2/x", {}, 0),
    "HEAD of an infer path": ("HEAD", INFER, {}, 0),
    "GET that waits to be told": ("GET", "/v2/x", {"Expect": "100-continue"}, 5),
    "POST that waits to be told": ("POST", "/v2/x", {"expect": "100-Continue"}, 5),
    "infer that waits to be told": ("POST", INFER, {"Expect": "100-continue"}, 10),
    "another expectation": ("POST", "/v2/x", {"Expect": "more"}, 5),
    "POST without a length": ("POST", "/v2/x", {}, 0),
    "PUT without a length": ("PUT", "/v2/x", {}, 0),
    "DELETE without a length": ("DELETE", "/v2/x", {}, 0),
    "OPTIONS without a length": ("OPTIONS", "/v2/x", {}, 0),
    "infer without a body": ("POST", INFER, {}, 0),
    "infer with an empty body": ("POST", INFER, {"Content-Length": "0"}, 0),
    "infer with many tensors": ("POST", INFER, {HEADER_LENGTH: "10"}, CONVERT_CHUNK + 1),
    "no header length": ("POST", INFER, {HEADER_LENGTH: ""}, 10),
    "gzip": ("POST", INFER, {"Content-Encoding": "gzip"}, 10),
    "generate, compressed": ("POST", "/v2/models/m/generate", {"Content-Encoding": "gzip"}, 5),
    "an unknown coding": ("POST", INFER, {"content-encoding": "X"}, 10),
    "said not to be compressed": ("POST", INFER, {"Content-Encoding": " Identity "}, 10),
    "an empty coding": ("POST", "/v2/models/m/generate", {"Content-Encoding": ""}, 5),
    "server metadata": ("GET", "/v2", {}, 0),
    "server metadata with a slash": ("GET", "/v2/?x", {}, 0),
    "trace settings": ("GET", "/v2/trace/setting", {}, 0),
    "trace settings of a model": ("POST", "/v2/models/m/trace", {}, 5),
    "load": ("POST", "/v2/repository/models/m/load", {}, 2),
    "unload": ("POST", "/v2/repository/models/m/unload", {"Content-Length": "0"}, 0),
    "liveness": ("GET", "/v2/health/live", {}, 0),
    "readiness": ("GET", "/v2/health/ready?x", {}, 0),
    "too large to forward": ("POST", "/v2/x", {}, CONVERT_CHUNK + 1),
    "too large to convert": ("POST", INFER, {}, LIMITS.max_inference_header_bytes + 1),
}


@pytest.mark.parametrize(("method", "target", "headers", "length"), STREAMED.values(), ids=STREAMED)
async def test_other_request_takes_the_streaming_path(
    method: str, target: str, headers: dict[str, str], length: int
) -> None:
    assert make_plan(method, target, {"Host": "h", **headers}, length) is None


@pytest.mark.parametrize(
    ("method", "target"),
    [("GET", "/v2/models/stats"), ("GET", "/v2/logging"), ("POST", "/v2/repository/index")],
)
async def test_request_for_all_servers_has_a_plan_if_there_is_one_server(
    method: str, target: str
) -> None:
    def plan(*router: Destination) -> CallPlan | None:
        routes = Router([Route(Match(), router, (1,) * len(router))])
        return FastPath(routes).plan(method, target, make_headers({"Content-Length": "0"}), 0)

    one, two = make_destination(ReadyEndpoint()), make_destination(ReadyEndpoint(), name="two")
    several = make_destination(ReadyEndpoint(url="http://a"), ReadyEndpoint(url="http://b"))
    assert plan(one) is not None
    assert plan(one, two) is None
    # Servers of one upstream have the same models, but their own statistics.
    assert (plan(several) is not None) is (target == "/v2/repository/index")


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
    ],
)
async def test_request_over_a_cap_takes_the_streaming_path(
    target: str, length: int, limits: dict[str, Any], on_fast_path: bool
) -> None:
    plan = make_plan("POST", target, {}, length, replace(LIMITS, **limits))
    assert (plan is not None) is on_fast_path


HOP_BY_HOP = [
    ("Connection", "keep-alive, X-Hop"),
    ("connection", "x-other"),
    ("X-Hop", "1"),
    ("X-Other", "2"),
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
    plan = make_plan("POST", "/v2/x", [*HOP_BY_HOP, *END_TO_END, ("Accept-Encoding", "gzip")], 5)
    assert plan is not None
    assert template_of(plan).headers == (
        *END_TO_END,
        ("Accept-Encoding", "gzip"),
        ("Content-Length", "5"),
    )
    plan = make_plan("POST", INFER, [*HOP_BY_HOP, *END_TO_END], 5)
    assert plan is not None
    assert template_of(plan).headers == (*END_TO_END, *BINARY.items())


async def test_converted_request_asks_for_no_compressed_response() -> None:
    wishes = [("Accept-Encoding", "gzip"), ("accept-encoding", "br"), ("Accept", "x/y")]
    plan = make_plan("POST", INFER, wishes, 5)
    assert plan is not None
    assert template_of(plan).headers == (("Accept", "x/y"), *BINARY.items())


@pytest.mark.parametrize(
    ("accepted", "on_fast_path"),
    [("", True), ("br", True), ("gzip;q=0", True), ("br, gzip", False)],
)
@pytest.mark.parametrize("target", [INFER, "/v2/x"])
async def test_response_to_be_compressed_takes_the_streaming_path(
    target: str, accepted: str, on_fast_path: bool
) -> None:
    router = Router([Route(Match(), (make_destination(ReadyEndpoint()),), codings=("gzip",))])
    headers = {"Content-Length": "5", **({"Accept-Encoding": accepted} if accepted else {})}
    plan = FastPath(router).plan("POST", target, make_headers(headers), 5)
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
    plan = make_plan(method, "/v2/x", {"Host": "h", "Connection": options}, length)
    if plan is not None:
        assert CIMultiDict(template_of(plan).headers).getall("Content-Length", []) == [str(length)]


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


@pytest.mark.parametrize(
    ("method", "body"), [("GET", b""), ("GET", b"hello"), ("POST", b"{not looked at")]
)
async def test_passthrough_request_is_sent_unchanged(method: str, body: bytes) -> None:
    scene = Scene()
    assert scene.start(method, "/v2/x?y", body) is not None
    assert (scene.asked.start.method, scene.asked.start.target) == (method, "/v2/x?y")
    assert scene.asked.body == body
    sized = {"Content-Length": str(len(body))} if body else {}
    assert scene.asked.lines == [("Host", "h"), *sized.items()]


async def test_requests_of_one_plan_share_their_template() -> None:
    scene = Scene()
    headers = make_headers({"Host": "h", "Content-Length": str(len(JSON))})
    plan = scene.fast_path.plan("POST", INFER, headers, len(JSON))
    assert plan is not None
    for body in (JSON, json_request(1, 2)):
        assert scene.fast_path.start(plan, body, scene.client) is not None
    first, second = scene.endpoint.asked
    assert first.start is second.start
    assert first.body != second.body


def _with_outputs(*outputs: object, **parameters: object) -> bytes:
    fields = json.loads(JSON)
    if outputs:
        fields["outputs"] = outputs
    if parameters:
        fields["parameters"] = parameters
    return json.dumps(fields).encode()


def _tensor(**changed: object) -> bytes:
    entry = {"name": "IN", "shape": [2], "datatype": "FP32", "data": [1, 2], **changed}
    return json.dumps({"inputs": [entry]}).encode()


INVALID = {
    "no JSON": b"what?",
    "JSON cut short": JSON[:-1],
    "no object": b"[1]",
    "no inputs": b"{}",
    "a text among numbers": _tensor(data=[1, "2"]),
    "does not fit": _tensor(datatype="UINT8", data=[1, 300]),
    "wrong shape": _tensor(shape=[3]),
    "nested too deep": b'{"inputs":[],"x":' + b"[" * 70 + b"]" * 70 + b"}",
}


@pytest.mark.parametrize("body", INVALID.values(), ids=INVALID)
async def test_invalid_request_takes_the_streaming_path(body: bytes) -> None:
    scene = Scene()
    assert scene.start(body=body) is None
    assert scene.log == ["connection is not used"]
    assert scene.outstanding == 0


@pytest.mark.parametrize(
    "body",
    [
        _with_outputs({"name": "O"}),
        _with_outputs({"name": "O", "parameters": {"binary_data": False}}),
        _with_outputs(binary_data_output=False),
        b'{"inputs":[]}',
        _with_outputs({"name": "O", "parameters": {"binary_data": True}}),
        _with_outputs(binary_data_output=True),
        _with_outputs({"name": "O"}, {"name": "P", "parameters": {"binary_data": True}}),
        _tensor(datatype="BYTES", data=["a", "b"]),
        _tensor(datatype="BOOL", data=[True, False]),
    ],
)
async def test_request_for_outputs_of_any_encoding_is_started(body: bytes) -> None:
    scene = Scene()
    assert scene.start(body=body) is not None


@pytest.mark.parametrize(("method", "body"), [("GET", b""), ("POST", JSON)])
async def test_request_without_an_idle_connection_takes_the_streaming_path(
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


async def test_request_takes_the_streaming_path_if_the_transport_must_wait() -> None:
    class Slow(ReadyEndpoint):
        def try_reserve(self) -> ReservedConnection | None:
            return super(ReadyEndpoint, self).try_reserve()

    destination = make_destination(Slow())
    fast_path = FastPath(single_destination(destination))
    plan = fast_path.plan("GET", "/v2/x", make_headers({}), 0)
    assert plan is not None
    assert fast_path.start(plan, b"", ScriptedClient()) is None
    assert destination.upstream.pool.outstanding == [0]


class _FailingConnection(ReservedConnection):
    """Fails after a part of the request may have been sent."""

    def send(
        self,
        template: RequestTemplate,
        headers: HeaderLines,
        body: bytes,
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
    plan = fast_path.plan("GET", "/v2/x", make_headers({}), 0)
    assert plan is not None
    assert fast_path.start(plan, b"", client) is not None
    assert destination.upstream.pool.outstanding == [1]
    await asyncio.sleep(0)
    assert [(each.status, each.last) for each in client.responses] == [(500, True)]
    assert destination.upstream.pool.outstanding == [0]
    assert destination.memory_budget.total == 0
    assert "ZeroDivisionError" in caplog.text
    fast_path.close()


async def test_nothing_is_converted_before_there_is_a_connection() -> None:
    scene = Scene()
    scene.endpoint.ready = False
    headers = make_headers({"Host": "h", "Content-Length": str(len(JSON))})
    plan = scene.fast_path.plan("POST", INFER, headers, len(JSON))
    assert plan is not None
    handler = mock.Mock()
    assert scene.fast_path.start(replace(plan, handler=handler), JSON, scene.client) is None
    handler.to_server.assert_not_called()
    assert scene.outstanding == 0


async def test_least_busy_endpoint_gets_the_request() -> None:
    one, two = ReadyEndpoint(url="http://one"), ReadyEndpoint(url="http://two")
    destination = make_destination(one, two)
    fast_path = FastPath(single_destination(destination))
    plan = fast_path.plan("GET", "/v2/x", make_headers({}), 0)
    assert plan is not None
    for _ in range(4):
        assert fast_path.start(plan, b"", ScriptedClient()) is not None
    assert [len(one.asked), len(two.asked)] == [2, 2]
    one.asked[0].receiver.on_complete(response_head(), b"")
    assert destination.upstream.pool.outstanding == [1, 2]
    for _ in range(2):
        assert fast_path.start(plan, b"", ScriptedClient()) is not None
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
    headers = {"Content-Length": str(len(body))} if body else {}
    plan = fast_path.plan(method, target, make_headers(headers), len(body))
    assert plan is not None
    for _ in range(4):
        assert fast_path.start(plan, body, ScriptedClient()) is not None
    assert [len(each.asked) for each in endpoints] == [0, 4, 0]
    fast_path.close()


async def test_upstream_without_endpoints_takes_the_streaming_path() -> None:
    destination = make_destination(ReadyEndpoint())
    fast_path = FastPath(single_destination(destination))
    plan = fast_path.plan("GET", "/v2/x", make_headers({}), 0)
    assert plan is not None
    destination.upstream.pool.set_endpoints([])
    assert fast_path.start(plan, b"", ScriptedClient()) is None
    await destination.upstream.pool.close()


def test_no_dialect_refuses_a_head_part_that_the_fast_path_takes() -> None:
    limits = [dialect.max_head_part for dialect in DIALECTS.values()]
    assert all(limit is None or limit >= LONG_HEAD_PART for limit in limits)


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
    plan = make_plan("POST", target, {"Host": "h", **headers}, 5)
    assert plan is not None
    assert plan.is_untyped is is_untyped
