from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.policies import JsonPolicies, Nonfinite
from gateway.codec.v2.fast_request import MAX_FAST_REQUEST
from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.observe.failure_log import FAILURE_LOG
from gateway.proxy.admission.conversion_scheduler import MAX_UNSCHEDULED
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.fast_path import call as call_module
from gateway.proxy.fast_path.call import CallPlan, FastPathCall
from gateway.proxy.fast_path.planner import MAX_PASSTHROUGH, FastPath
from gateway.proxy.interfaces import Limits, Route
from gateway.proxy.router import Router, Rule
from gateway.routing.matcher import Match
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryPolicy
from gateway.upstream.pool.model_discovery import ModelDiscovery
from gateway.upstream.pool.supervisor import PoolSupervisor
from gateway.upstream.transport import (
    HeaderLines,
    PendingRequest,
    RequestTemplate,
    ResponseReceiver,
)
from tests.support.doubles.clock import Clock
from tests.support.doubles.fast_path import (
    DeliveredResponse,
    ReadyEndpoint,
    ScriptedClient,
    SentRequest,
    response_head,
)
from tests.support.doubles.streaming import (
    LIMITS,
    URL,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
    make_route,
    ready,
    single_route,
)
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_response_header,
    json_request,
)

JSON = json_request()
BINARY = {"Content-Type": "application/octet-stream"}
VALUES = [1.5, -2, 3e30]
"""FLOATS as JSON values."""


def _headers(headers: dict[str, str] | list[tuple[str, str]]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(headers))


# -------------------------------------------------------------------------------------------- plans


def _plan(
    method: str,
    target: str,
    headers: dict[str, str] | list[tuple[str, str]],
    length: int,
    limits: Limits = LIMITS,
) -> CallPlan | None:
    """Return the plan for a head, with the Content-Length of a body added."""
    made = CIMultiDict(headers)
    if length and "Content-Length" not in made:
        made["Content-Length"] = str(length)
    straight = FastPath(single_route(make_route(ReadyEndpoint(), limits=limits)))
    try:
        return straight.plan(method, target, CIMultiDictProxy(made), length)
    finally:
        straight.close()


FORWARDED: dict[str, tuple[str, str, dict[str, str], int]] = {
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
    "the largest": ("POST", "/v2/x", {}, MAX_PASSTHROUGH),
}


@pytest.mark.parametrize(
    ("method", "target", "headers", "length"), FORWARDED.values(), ids=FORWARDED
)
async def test_passthrough_request_has_a_plan(
    method: str, target: str, headers: dict[str, str], length: int
) -> None:
    plan = _plan(method, target, {"Host": "h", "X-A": "1", **headers}, length)
    assert plan is not None
    assert not plan.converts
    assert (plan.template.method, plan.template.target) == (method, target)
    sized = {"Content-Length": str(length)} if length else {}
    assert plan.template.headers == tuple({"Host": "h", "X-A": "1", **headers, **sized}.items())


CONVERTED: dict[str, tuple[str, dict[str, str], int]] = {
    "JSON": (INFER, {}, 10),
    "a version and a query": ("/v2/models/m/versions/2/infer?x=1", {}, 10),
    "one byte": (INFER, {}, 1),
    "all that a header may have": (INFER, {}, LIMITS.header_bytes),
    "said to be something": (INFER, {"Content-Type": "text/plain"}, 10),
    "said to be binary": (INFER, BINARY, 10),
}


@pytest.mark.parametrize(("target", "headers", "length"), CONVERTED.values(), ids=CONVERTED)
async def test_json_infer_request_has_a_plan(
    target: str, headers: dict[str, str], length: int
) -> None:
    plan = _plan("POST", target, {"Host": "h", **headers}, length)
    assert plan is not None
    assert plan.converts
    assert (plan.template.method, plan.template.target) == ("POST", target)
    kept = {name: value for name, value in headers.items() if name != "Content-Type"}
    assert dict(plan.template.headers) == {"Host": "h", **kept, **BINARY}
    assert len(plan.template.headers) == len({"Host", *kept, *BINARY})


ORDINARY: dict[str, tuple[str, str, dict[str, str], int]] = {
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
    "infer with tensors": ("POST", INFER, {HEADER_LENGTH: "10"}, 22),
    "raw binary": ("POST", INFER, {HEADER_LENGTH.lower(): "0"}, 12),
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
    "too large to forward": ("POST", "/v2/x", {}, MAX_PASSTHROUGH + 1),
    "too large to convert": ("POST", INFER, {}, LIMITS.header_bytes + 1),
}


@pytest.mark.parametrize(("method", "target", "headers", "length"), ORDINARY.values(), ids=ORDINARY)
async def test_other_request_takes_the_streaming_path(
    method: str, target: str, headers: dict[str, str], length: int
) -> None:
    assert _plan(method, target, {"Host": "h", **headers}, length) is None


@pytest.mark.parametrize(
    ("method", "target"),
    [("GET", "/v2/models/stats"), ("GET", "/v2/logging"), ("POST", "/v2/repository/index")],
)
async def test_request_for_all_servers_has_a_plan_if_there_is_one_server(
    method: str, target: str
) -> None:
    def plan(*routes: Route) -> CallPlan | None:
        rules = Router([Rule(Match(), routes, (1,) * len(routes))])
        return FastPath(rules).plan(method, target, _headers({"Content-Length": "0"}), 0)

    one, two = make_route(ReadyEndpoint()), make_route(ReadyEndpoint(), name="two")
    several = make_route(ReadyEndpoint(url="http://a"), ReadyEndpoint(url="http://b"))
    assert plan(one) is not None
    assert plan(one, two) is None
    # Servers of one upstream have the same models, but their own statistics.
    assert (plan(several) is not None) is (target == "/v2/repository/index")


@pytest.mark.parametrize(
    ("target", "length", "limits", "straight"),
    [
        ("/v2/x", 1000, {"request_bytes": 1000}, True),
        ("/v2/x", 1001, {"request_bytes": 1000}, False),
        ("/v2/x", 1001, {"header_bytes": 1000}, True),
        ("/v2/x", MAX_PASSTHROUGH + 1, {"request_bytes": 10 * MAX_PASSTHROUGH}, False),
        (INFER, 1000, {"request_bytes": 1000}, True),
        (INFER, 1001, {"request_bytes": 1000}, False),
        (INFER, 1000, {"header_bytes": 1000}, True),
        (INFER, 1001, {"header_bytes": 1000}, False),
        (INFER, MAX_FAST_REQUEST, {"header_bytes": 10 * MAX_PASSTHROUGH}, True),
        (INFER, MAX_FAST_REQUEST + 1, {"header_bytes": 10 * MAX_PASSTHROUGH}, False),
    ],
)
async def test_request_over_a_cap_takes_the_streaming_path(
    target: str, length: int, limits: dict[str, Any], straight: bool
) -> None:
    plan = _plan("POST", target, {}, length, replace(LIMITS, **limits))
    assert (plan is not None) is straight


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
    plan = _plan("POST", "/v2/x", [*HOP_BY_HOP, *END_TO_END, ("Accept-Encoding", "gzip")], 5)
    assert plan is not None
    assert plan.template.headers == (
        *END_TO_END,
        ("Accept-Encoding", "gzip"),
        ("Content-Length", "5"),
    )
    plan = _plan("POST", INFER, [*HOP_BY_HOP, *END_TO_END], 5)
    assert plan is not None
    assert plan.template.headers == (*END_TO_END, *BINARY.items())


async def test_converted_request_asks_for_no_compressed_response() -> None:
    wishes = [("Accept-Encoding", "gzip"), ("accept-encoding", "br"), ("Accept", "x/y")]
    plan = _plan("POST", INFER, wishes, 5)
    assert plan is not None
    assert plan.template.headers == (("Accept", "x/y"), *BINARY.items())


@pytest.mark.parametrize(
    ("accepted", "straight"), [("", True), ("br", True), ("gzip;q=0", True), ("br, gzip", False)]
)
@pytest.mark.parametrize("target", [INFER, "/v2/x"])
async def test_response_to_be_compressed_takes_the_streaming_path(
    target: str, accepted: str, straight: bool
) -> None:
    routes = Router([Rule(Match(), (make_route(ReadyEndpoint()),), codings=("gzip",))])
    headers = {"Content-Length": "5", **({"Accept-Encoding": accepted} if accepted else {})}
    plan = FastPath(routes).plan("POST", target, _headers(headers), 5)
    assert (plan is not None) is straight
    if plan is not None:
        assert plan.adds_vary
        assert "Accept-Encoding" not in dict(plan.template.headers)


@pytest.mark.parametrize(("method", "length"), [("POST", 5), ("GET", 5), ("PUT", 9)])
@pytest.mark.parametrize("options", ["Content-Length", "close, content-length"])
async def test_body_is_never_sent_without_its_length(
    method: str, length: int, options: str
) -> None:
    """The client must not choose what the server takes for the next request."""
    plan = _plan(method, "/v2/x", {"Host": "h", "Connection": options}, length)
    if plan is not None:
        assert CIMultiDict(plan.template.headers).getall("Content-Length", []) == [str(length)]


# ----------------------------------------------------------------------------------------- requests


class _Scene:
    """A client, a server with an idle connection, and the fast path between them."""

    def __init__(
        self,
        limits: Limits = LIMITS,
        policies: JsonPolicies | None = None,
        retry: RetryPolicy = SAFE_RETRIES_ONLY,
    ) -> None:
        self.log = EventLog()
        self.clock = Clock()
        self.client = ScriptedClient(self.log)
        self.endpoint = ReadyEndpoint(self.log)
        route = make_route(self.endpoint, limits=limits, policies=policies)
        self.route: Route = replace(route, retry_policy=retry)
        with mock.patch("asyncio.get_running_loop", return_value=self.clock):
            self.straight = FastPath(single_route(self.route))

    def start(
        self, method: str = "POST", target: str = INFER, body: bytes = JSON
    ) -> FastPathCall | None:
        headers = {"Host": "h"}
        if body:
            headers["Content-Length"] = str(len(body))
        plan = self.straight.plan(method, target, _headers(headers), len(body))
        assert plan is not None
        return self.straight.start(plan, body, self.client)

    def infer(self) -> FastPathCall:
        exchange = self.start()
        assert exchange is not None
        assert self.outstanding == 1
        return exchange

    def get(self) -> FastPathCall:
        exchange = self.start("GET", "/v2/x", b"")
        assert exchange is not None
        assert self.outstanding == 1
        return exchange

    @property
    def asked(self) -> SentRequest:
        return self.endpoint.asked[-1]

    @property
    def receiver(self) -> ResponseReceiver:
        return self.asked.receiver

    @property
    def responses(self) -> DeliveredResponse:
        assert len(self.client.responses) == 1
        return self.client.responses[0]

    @property
    def error(self) -> str:
        """Return the message of the error that the client got."""
        assert self.responses.headers == (("Content-Type", "application/json"),)
        fields = json.loads(self.responses.body)
        assert list(fields) == ["error"]
        return str(fields["error"])

    @property
    def outstanding(self) -> int:
        return sum(self.route.upstream.pool.outstanding)


async def test_json_request_is_converted_and_sent() -> None:
    scene = _Scene()
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
    scene = _Scene(replace(LIMITS, header_bytes=MAX_FAST_REQUEST))
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
    scene = _Scene()
    assert scene.start(method, "/v2/x?y", body) is not None
    assert (scene.asked.start.method, scene.asked.start.target) == (method, "/v2/x?y")
    assert scene.asked.body == body
    sized = {"Content-Length": str(len(body))} if body else {}
    assert scene.asked.lines == [("Host", "h"), *sized.items()]


async def test_requests_of_one_plan_share_their_template() -> None:
    scene = _Scene()
    headers = _headers({"Host": "h", "Content-Length": str(len(JSON))})
    plan = scene.straight.plan("POST", INFER, headers, len(JSON))
    assert plan is not None
    for body in (JSON, json_request(1, 2)):
        assert scene.straight.start(plan, body, scene.client) is not None
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


NOT_BEGUN = {
    "no JSON": b"what?",
    "JSON cut short": JSON[:-1],
    "no object": b"[1]",
    "no inputs": b"{}",
    "a text among numbers": _tensor(data=[1, "2"]),
    "does not fit": _tensor(datatype="UINT8", data=[1, 300]),
    "wrong shape": _tensor(shape=[3]),
    "BYTES": _tensor(datatype="BYTES", data=["a", "b"]),
    "nested too deep": b'{"inputs":[],"x":' + b"[" * 70 + b"]" * 70 + b"}",
    "an output in binary form": _with_outputs({"name": "O", "parameters": {"binary_data": True}}),
    "all outputs in binary form": _with_outputs(binary_data_output=True),
    "outputs of both forms": _with_outputs(
        {"name": "O"}, {"name": "P", "parameters": {"binary_data": True}}
    ),
}


@pytest.mark.parametrize("body", NOT_BEGUN.values(), ids=NOT_BEGUN)
async def test_request_with_special_encodings_takes_the_streaming_path(body: bytes) -> None:
    scene = _Scene()
    assert scene.start(body=body) is None
    assert scene.log == []
    assert scene.outstanding == 0


@pytest.mark.parametrize(
    "body",
    [
        _with_outputs({"name": "O"}),
        _with_outputs({"name": "O", "parameters": {"binary_data": False}}),
        _with_outputs(binary_data_output=False),
        b'{"inputs":[]}',
    ],
)
async def test_request_for_json_outputs_is_started(body: bytes) -> None:
    scene = _Scene()
    assert scene.start(body=body) is not None


@pytest.mark.parametrize(("method", "body"), [("GET", b""), ("POST", JSON)])
async def test_request_without_an_idle_connection_takes_the_streaming_path(
    method: str, body: bytes
) -> None:
    scene = _Scene()
    scene.endpoint.ready = False
    assert scene.start(method, INFER, body) is None
    assert scene.log == []
    assert scene.outstanding == 0
    assert scene.clock.timers == []
    scene.endpoint.ready = True
    assert scene.start(method, INFER, body) is not None


async def test_request_takes_the_streaming_path_if_the_transport_must_wait() -> None:
    class Slow(ReadyEndpoint):
        def try_send_nowait(
            self,
            start: RequestTemplate,
            headers: HeaderLines,
            body: bytes,
            receiver: ResponseReceiver,
        ) -> PendingRequest | None:
            return super(ReadyEndpoint, self).try_send_nowait(start, headers, body, receiver)

    route = make_route(Slow())
    straight = FastPath(single_route(route))
    plan = straight.plan("GET", "/v2/x", _headers({}), 0)
    assert plan is not None
    assert straight.start(plan, b"", ScriptedClient()) is None
    assert route.upstream.pool.outstanding == [0]


async def test_failed_send_releases_its_lease() -> None:
    class Failing(ReadyEndpoint):
        def try_send_nowait(
            self,
            start: RequestTemplate,
            headers: HeaderLines,
            body: bytes,
            receiver: ResponseReceiver,
        ) -> PendingRequest | None:
            raise ZeroDivisionError

    route = make_route(Failing())
    straight = FastPath(single_route(route))
    plan = straight.plan("GET", "/v2/x", _headers({}), 0)
    assert plan is not None
    with pytest.raises(ZeroDivisionError):
        straight.start(plan, b"", ScriptedClient())
    assert route.upstream.pool.outstanding == [0]


async def test_least_busy_endpoint_gets_the_request() -> None:
    one, two = ReadyEndpoint(url="http://one"), ReadyEndpoint(url="http://two")
    route = make_route(one, two)
    straight = FastPath(single_route(route))
    plan = straight.plan("GET", "/v2/x", _headers({}), 0)
    assert plan is not None
    for _ in range(4):
        assert straight.start(plan, b"", ScriptedClient()) is not None
    assert [len(one.asked), len(two.asked)] == [2, 2]
    one.asked[0].receiver.on_complete(response_head(), b"")
    assert route.upstream.pool.outstanding == [1, 2]
    for _ in range(2):
        assert straight.start(plan, b"", ScriptedClient()) is not None
    assert route.upstream.pool.outstanding in ([3, 2], [2, 3])
    straight.close()


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
    route = make_route(*endpoints, supervisor=PoolSupervisor(model_discovery=ModelDiscovery(60)))
    for member, model in zip(route.upstream.pool.members, models, strict=True):
        member.models = ready(model)
    straight = FastPath(single_route(route))
    headers = {"Content-Length": str(len(body))} if body else {}
    plan = straight.plan(method, target, _headers(headers), len(body))
    assert plan is not None
    for _ in range(4):
        assert straight.start(plan, body, ScriptedClient()) is not None
    assert [len(each.asked) for each in endpoints] == [0, 4, 0]
    straight.close()


async def test_upstream_without_endpoints_takes_the_streaming_path() -> None:
    route = make_route(ReadyEndpoint())
    straight = FastPath(single_route(route))
    plan = straight.plan("GET", "/v2/x", _headers({}), 0)
    assert plan is not None
    route.upstream.pool.set_endpoints([])
    assert straight.start(plan, b"", ScriptedClient()) is None
    await route.upstream.pool.close()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("status", "ejections"), [(200, 0), (404, 0), (500, 0), (503, 1)])
async def test_response_status_is_recorded_for_its_endpoint(
    status: int, ejections: int, begun: bool
) -> None:
    bad, good = ReadyEndpoint(url="http://bad"), ReadyEndpoint(url="http://good")
    route = make_route(bad, good)
    straight = FastPath(single_route(route))
    plan = straight.plan("GET", "/v2/x", _headers({}), 0)
    assert plan is not None
    for _ in range(10):
        client = ScriptedClient()
        assert straight.start(plan, b"", client) is not None
        for asked in (*bad.asked, *good.asked):
            if begun:
                asked.receiver.on_headers(
                    ScriptedUpstreamResponse(status if bad.asked else 200, {}, [b"x"])
                )
                await client.begin_task(ScriptedClientResponse(EventLog()))
            else:
                asked.receiver.on_complete(response_head(status if bad.asked else 200), b"")
        bad.asked.clear()
        good.asked.clear()
    assert [each.ejection.ejections for each in route.upstream.pool.members] == [ejections, 0]
    straight.close()


@pytest.mark.parametrize("stalls", [False, True], ids=["broken off", "stalled"])
async def test_endpoint_whose_responses_never_end_has_failed(stalls: bool) -> None:
    bad, good = ReadyEndpoint(url="http://bad"), ReadyEndpoint(url="http://good")
    route = make_route(bad, good, limits=replace(LIMITS, idle_timeout=0.1) if stalls else LIMITS)
    straight = FastPath(single_route(route))
    plan = straight.plan("GET", "/v2/x", _headers({}), 0)
    assert plan is not None
    for _ in range(10):
        client = ScriptedClient()
        assert straight.start(plan, b"", client) is not None
        for asked in (*bad.asked, *good.asked):
            fault = asyncio.Event() if stalls else bad_response("it fell over")
            steps = [b"begun", fault] if bad.asked else [b"whole"]
            asked.receiver.on_headers(ScriptedUpstreamResponse(200, {}, steps))
            await client.begin_task(ScriptedClientResponse(EventLog()))
        bad.asked.clear()
        good.asked.clear()
    assert [each.ejection.ejections for each in route.upstream.pool.members] == [1, 0]
    straight.close()


# ------------------------------------------------------------------------------- complete responses


def _binary(*tensors: bytes, **headers: str) -> tuple[dict[str, str], bytes]:
    """Return headers and body of a response with tensors."""
    header = binary_response_header(*map(len, tensors))
    return {**BINARY, HEADER_LENGTH: str(len(header)), **headers}, header + b"".join(tensors)


async def test_binary_tensors_become_json() -> None:
    headers, body = _binary(FLOATS.tobytes(), X="1")
    headers |= {"Content-Length": str(len(body)), "Connection": "X-Hop", "X-Hop": "1"}
    scene = _Scene()
    scene.infer()
    scene.receiver.on_complete(response_head(headers=headers), body)
    assert (scene.responses.status, scene.responses.reason, scene.responses.last) == (
        200,
        "OK",
        False,
    )
    assert scene.responses.headers == (("X", "1"), ("Content-Type", "application/json"))
    (output,) = json.loads(scene.responses.body)["outputs"]
    assert output == {"name": "OUT0", "shape": [3], "datatype": "FP32", "data": VALUES}
    assert scene.outstanding == 0


@pytest.mark.parametrize("view", [bytes, memoryview])
async def test_numbers_of_a_response_are_its_own(
    view: Callable[[bytes], bytes | memoryview],
) -> None:
    """Equal heads are one object; what is cached for a head does not depend on a body."""
    scene = _Scene()
    one, two = _binary(bytes(4)), _binary(FLOATS.tobytes())
    first, second = response_head(headers=one[0]), response_head(headers=two[0])
    for head, body, data in [
        (first, one[1], [0]),
        (second, two[1], VALUES),
        (first, one[1][:-4] + FLOATS.tobytes()[:4], [1.5]),
    ]:
        scene.client.responses.clear()
        scene.infer()
        scene.receiver.on_complete(head, view(body))
        assert json.loads(scene.responses.body)["outputs"][0]["data"] == data


@pytest.mark.parametrize("policy", [Nonfinite.NULL, Nonfinite.STRING, Nonfinite.ERROR])
async def test_json_policies_hold(policy: Nonfinite) -> None:
    scene = _Scene(policies=JsonPolicies(nonfinite=policy))
    scene.infer()
    nan = b"\0\0\xc0\x7f"
    headers, body = _binary(nan)
    scene.receiver.on_complete(response_head(headers=headers), body)
    if policy is Nonfinite.ERROR:
        assert scene.responses.status == 406
        assert "OUT0" in scene.error
        assert URL not in scene.error
    else:
        (value,) = json.loads(scene.responses.body)["outputs"][0]["data"]
        assert value == (None if policy is Nonfinite.NULL else "NaN")


EMPTY = binary_response_header(0)


@pytest.mark.parametrize(
    "body",
    [
        b'{"outputs":[ ]}',
        b"",
        b"no JSON",
        b'{"binary_data_size" 0}',
        b'{"outputs":[{"parameters":{"binary_data_size":4}}]}',
        EMPTY.ljust(LIMITS.header_bytes + 1),
    ],
)
async def test_response_without_tensors_passes(body: bytes) -> None:
    scene = _Scene()
    scene.infer()
    scene.receiver.on_complete(response_head(headers={"Content-Type": "x/y", "X": "1"}), body)
    assert scene.responses.status == 200
    assert scene.responses.headers == (("Content-Type", "x/y"), ("X", "1"))
    assert scene.responses.body == body


@pytest.mark.parametrize("size", [len(EMPTY), LIMITS.header_bytes])
async def test_response_without_tensors_gets_its_empty_data(size: int) -> None:
    scene = _Scene()
    scene.infer()
    scene.receiver.on_complete(response_head(headers={"Content-Type": "x/y"}), EMPTY.ljust(size))
    (output,) = json.loads(scene.responses.body)["outputs"]
    assert output == {"name": "OUT0", "shape": [0], "datatype": "FP32", "data": []}


@pytest.mark.parametrize("status", [201, 202, 204, 302, 304, 400, 404, 500, 503])
@pytest.mark.parametrize("way", ["infer", "get"])
async def test_error_response_passes_untouched(status: int, way: str) -> None:
    scene = _Scene()
    getattr(scene, way)()
    headers = {"Content-Length": "4", HEADER_LENGTH: "x", "X": "1", "Keep-Alive": "timeout=5"}
    scene.receiver.on_complete(response_head(status, headers, "So So"), b"body")
    assert scene.responses == DeliveredResponse(
        status,
        "So So",
        (("Content-Length", "4"), (HEADER_LENGTH, "x"), ("X", "1")),
        b"body",
        last=False,
    )


async def test_response_to_a_passthrough_request_passes() -> None:
    scene = _Scene()
    scene.get()
    headers, body = _binary(FLOATS.tobytes())
    scene.receiver.on_complete(response_head(headers=headers), memoryview(body))
    assert scene.responses == DeliveredResponse(200, "OK", tuple(headers.items()), body, last=False)


LIES = {
    "no number": ({HEADER_LENGTH: "x"}, b"{}", HEADER_LENGTH),
    "negative": ({HEADER_LENGTH: "-1"}, b"{}", HEADER_LENGTH),
    "above the cap": ({HEADER_LENGTH: "10001"}, b"{}", "limits.header_bytes"),
    "beyond the body": ({HEADER_LENGTH: "3"}, b"{}", "ends before"),
    "no JSON": ({HEADER_LENGTH: "1"}, b"{", "not valid JSON"),
    "too short": (
        {HEADER_LENGTH: str(len(binary_response_header(8)))},
        binary_response_header(8) + bytes(7),
        "ends before",
    ),
    "too long": (
        {HEADER_LENGTH: str(len(binary_response_header(8)))},
        binary_response_header(8) + bytes(9),
        "more bytes",
    ),
}


@pytest.mark.parametrize(("headers", "body", "fault"), LIES.values(), ids=LIES)
async def test_inconsistent_response_is_a_502_that_names_the_server(
    headers: dict[str, str], body: bytes, fault: str
) -> None:
    scene = _Scene()
    head = response_head(headers=headers)
    for _ in range(2):
        scene.client.responses.clear()
        scene.infer()
        scene.receiver.on_complete(head, body)
        assert scene.responses.status == 502
        assert scene.error.startswith(f"{URL}: ")
        assert fault in scene.error
        assert not scene.responses.last
        assert scene.outstanding == 0


async def test_unexpected_error_is_logged_and_becomes_a_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(call_module, "convert_to_json", fails)
    scene = _Scene()
    scene.infer()
    headers, body = _binary(bytes(4))
    scene.receiver.on_complete(response_head(headers=headers), body)
    assert (scene.responses.status, scene.responses.last) == (500, True)
    assert scene.error == "the gateway failed; its log says why"
    assert scene.outstanding == 0
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("tensorgate.proxy", "ERROR")
    assert f"POST {INFER} failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_connection_is_released_before_the_response_is_sent() -> None:
    """The client's next request may need the connection to the server."""
    scene = _Scene()
    scene.get()
    scene.receiver.on_complete(response_head(), b"")
    scene.get()
    scene.receiver.on_error(bad_response("it fell over"))
    assert scene.log == [
        "server is asked GET /v2/x",
        "server is let go",
        "client gets 200",
        "server is asked GET /v2/x",
        "server is let go",
        "client gets 502",
    ]


# -------------------------------------------------------------------------------------- no response


async def test_upstream_error_becomes_an_error_response(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FAILURE_LOG, "_window_end", float("-inf"))  # no other test has logged it
    scene = _Scene()
    scene.infer()
    scene.receiver.on_error(bad_response(f"{URL} closed the connection"))
    assert (scene.responses.status, scene.responses.reason, scene.responses.last) == (
        502,
        "",
        False,
    )
    assert scene.error == f"{URL} closed the connection"
    assert f"failed with 502: {URL} closed the connection" in caplog.messages[-1]


async def test_unexpected_error_of_the_upstream_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    scene = _Scene()
    scene.get()
    scene.receiver.on_error(ZeroDivisionError())
    assert (scene.responses.status, scene.responses.last) == (500, True)
    assert "GET /v2/x failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("error", "failures"),
    [
        (bad_response("it fell over"), 1),
        (GatewayError(ErrorKind.EXHAUSTED, "too many open files"), 0),
        (ZeroDivisionError(), 0),
    ],
)
async def test_errors_of_the_server_are_recorded_for_its_endpoint(
    error: Exception, failures: int
) -> None:
    endpoint = ReadyEndpoint()
    route = make_route(endpoint, ReadyEndpoint(url="http://other"))
    straight = FastPath(single_route(route))
    plan = straight.plan("GET", "/v2/x", _headers({}), 0)
    assert plan is not None
    assert straight.start(plan, b"", ScriptedClient()) is not None
    (asked,) = endpoint.asked
    asked.receiver.on_error(error)
    assert route.upstream.pool.members[0].ejection.failures == failures
    straight.close()


@pytest.mark.parametrize(
    ("idle_timeout", "request_timeout", "what"),
    [
        (2, 8, "nothing moved for 2 s (limits.idle_timeout)"),
        (8, 2, "not done in 2 s (limits.request_timeout)"),
        (2, 2, "not done in 2 s (limits.request_timeout)"),
    ],
)
async def test_server_that_is_late_is_a_504(
    idle_timeout: float, request_timeout: float, what: str
) -> None:
    scene = _Scene(replace(LIMITS, idle_timeout=idle_timeout, request_timeout=request_timeout))
    scene.infer()
    scene.clock.advance(1.75)
    assert scene.outstanding == 1
    scene.clock.advance(0.25)
    assert (scene.responses.status, scene.responses.last) == (504, False)
    assert scene.error == f"waiting for {URL}: {what}"
    assert scene.log[-2:] == ["server is let go", "client gets 504"]
    assert scene.outstanding == 0
    scene.clock.advance(100)
    assert len(scene.client.responses) == 1


async def test_ended_call_does_not_time_out() -> None:
    scene = _Scene()
    scene.get()
    scene.receiver.on_complete(response_head(), b"")
    scene.get()
    scene.receiver.on_error(bad_response("it fell over"))
    scene.get().cancel()
    scene.get()
    scene.receiver.on_headers(ScriptedUpstreamResponse())  # its task has its own deadline
    scene.clock.advance(1000)
    assert [told.status for told in scene.client.responses] == [200, 502]
    assert scene.outstanding == 1


async def test_closed_fast_path_times_out_nothing() -> None:
    scene = _Scene()
    scene.get()
    scene.straight.close()
    scene.clock.advance(1000)
    assert scene.client.responses == []
    assert scene.clock.pending == []


# -------------------------------------------------------------------------------- partial responses


async def test_partial_response_is_converted_in_a_task() -> None:
    scene = _Scene()
    scene.infer()
    headers, body = _binary(FLOATS.tobytes(), X="1")
    headers["Content-Length"] = str(len(body))
    scene.receiver.on_headers(
        ScriptedUpstreamResponse(200, headers, [body[:9], body[9:]]).with_log(scene.log)
    )
    assert scene.log[-1] == "client waits for a task"
    assert scene.outstanding == 1
    client_response = ScriptedClientResponse(scene.log)
    await scene.client.begin_task(client_response)
    assert client_response.status == 200
    assert json.loads(client_response.body)["outputs"][0]["data"] == VALUES
    assert client_response.headers["Content-Type"] == "application/json"
    assert client_response.headers["X"] == "1"
    assert "client has got all" in scene.log
    assert scene.client.responses == []
    assert scene.outstanding == 0


@pytest.mark.parametrize(("way", "status"), [("get", 200), ("get", 404), ("infer", 404)])
async def test_partial_response_streams_in_a_task(way: str, status: int) -> None:
    scene = _Scene()
    getattr(scene, way)()
    response = ScriptedUpstreamResponse(
        status, {HEADER_LENGTH: "x", "Upgrade": "y"}, [b"one", b"four"]
    )
    scene.receiver.on_headers(response.with_log(scene.log))
    client_response = ScriptedClientResponse(scene.log)
    await scene.client.begin_task(client_response)
    assert (client_response.status, client_response.body) == (status, b"onefour")
    assert dict(client_response.headers) == {HEADER_LENGTH: "x"}
    assert scene.log.index("client gets 3") < scene.log.index("server sends 4")
    assert scene.outstanding == 0


async def test_inconsistent_partial_response_is_a_502() -> None:
    scene = _Scene()
    scene.infer()
    scene.receiver.on_headers(
        ScriptedUpstreamResponse(200, {HEADER_LENGTH: "x"}, [b"{}"]).with_log(scene.log)
    )
    client_response = ScriptedClientResponse(scene.log)
    await scene.client.begin_task(client_response)
    assert client_response.status == 502
    assert URL in client_response.body.decode()
    assert scene.outstanding == 0


async def test_truncated_partial_response_is_aborted() -> None:
    scene = _Scene()
    scene.get()
    broken = ScriptedUpstreamResponse(200, {}, [b"begun", bad_response(f"{URL} fell over")])
    scene.receiver.on_headers(broken.with_log(scene.log))
    client_response = ScriptedClientResponse(scene.log)
    await scene.client.begin_task(client_response)
    assert client_response.body == b"begun"
    assert "client is cut off" in scene.log
    assert "client has got all" not in scene.log
    assert scene.outstanding == 0


@pytest.mark.parametrize("headers", [{HEADER_LENGTH: "9"}, {}])
async def test_stalled_partial_response_times_out(headers: dict[str, str]) -> None:
    scene = _Scene(replace(LIMITS, idle_timeout=0.02))
    scene.infer()
    scene.receiver.on_headers(
        ScriptedUpstreamResponse(200, headers, [asyncio.Event()]).with_log(scene.log)
    )
    client_response = ScriptedClientResponse(scene.log)
    await scene.client.begin_task(client_response)
    assert client_response.status == 504
    text = f"waiting for {URL}: nothing moved for 0.02 s (limits.idle_timeout)"
    assert json.loads(client_response.body) == {"error": text}
    assert scene.outstanding == 0


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the seconds that deadlines count as spent, in order."""
    times: list[float] = []
    make = Limits.new_deadline

    def deadline(limits: Limits, so_far: float = 0.0) -> Deadline:
        times.append(so_far)
        return make(limits, so_far)

    monkeypatch.setattr(Limits, "new_deadline", deadline)
    return times


async def test_time_before_the_partial_response_counts(spent: list[float]) -> None:
    scene = _Scene()
    scene.get()
    scene.clock.advance(12.5)
    scene.receiver.on_headers(ScriptedUpstreamResponse(200, {}, [b"a"]))
    scene.clock.advance(1)
    await scene.client.begin_task(ScriptedClientResponse(scene.log))
    assert spent == [12.5]


@pytest.mark.parametrize("failed", [False, True], ids=["a retried status", "an error"])
async def test_time_before_a_retry_counts(failed: bool, spent: list[float]) -> None:
    scene = _Scene(retry=RetryPolicy(no_response=True, statuses=frozenset((503,))))
    good = ScriptedUpstreamResponse(200, {}, [b"a"])
    scene.route.upstream.pool.set_endpoints([scene.endpoint, ScriptedEndpoint(scene.log, good)])
    scene.get()
    scene.clock.advance(12.5)
    if failed:
        scene.receiver.on_error(GatewayError(ErrorKind.NO_RESPONSE, "it closed"))
    else:
        scene.receiver.on_complete(response_head(503), b"")
    scene.clock.advance(1)
    client_response = ScriptedClientResponse(scene.log)
    await scene.client.begin_task(client_response)
    assert (client_response.status, client_response.body) == (200, b"a")
    assert spent == [12.5]


# ----------------------------------------------------------------------------------------- releases

End = Callable[[_Scene, FastPathCall], Awaitable[None]]


async def _whole(scene: _Scene, _: FastPathCall) -> None:
    scene.receiver.on_complete(response_head(), b"")


async def _broken(scene: _Scene, _: FastPathCall) -> None:
    scene.receiver.on_complete(response_head(headers={HEADER_LENGTH: "x"}), b"")


async def _failed(scene: _Scene, _: FastPathCall) -> None:
    scene.receiver.on_error(bad_response("it fell over"))


async def _late(scene: _Scene, _: FastPathCall) -> None:
    scene.clock.advance(1000)


async def _cancelled(_: _Scene, exchange: FastPathCall) -> None:
    exchange.cancel()


def _begin_task(scene: _Scene, *steps: bytes | BaseException | asyncio.Event) -> asyncio.Task[None]:
    scene.receiver.on_headers(ScriptedUpstreamResponse(200, {}, steps).with_log(scene.log))
    return scene.client.begin_task(ScriptedClientResponse(scene.log))


async def _relayed(scene: _Scene, _: FastPathCall) -> None:
    await _begin_task(scene, b"one", b"two")


async def _broken_off(scene: _Scene, _: FastPathCall) -> None:
    await _begin_task(scene, b"one", bad_response("it fell over"))


async def _fault(scene: _Scene, _: FastPathCall) -> None:
    with pytest.raises(ZeroDivisionError):
        await _begin_task(scene, ZeroDivisionError())


async def _left(scene: _Scene, _: FastPathCall) -> None:
    task = _begin_task(scene, b"one", asyncio.Event())
    for _turn in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _left_before_it_ran(scene: _Scene, _: FastPathCall) -> None:
    task = _begin_task(scene, b"one")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scene.log.count_of("server sends") == 0


ENDS: dict[str, End] = {
    "whole": _whole,
    "broken": _broken,
    "failed": _failed,
    "late": _late,
    "cancelled": _cancelled,
    "begun and relayed": _relayed,
    "begun and broken off": _broken_off,
    "begun and a fault of our own": _fault,
    "begun and left": _left,
    "begun and left before the task ran": _left_before_it_ran,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("way", ["infer", "get"])
async def test_resources_are_released_once(end: End, way: str) -> None:
    scene = _Scene()
    exchange: FastPathCall = getattr(scene, way)()
    other = scene.start("GET", "/v2/other", b"")
    assert other is not None
    scene.endpoint.asked.pop()
    assert scene.outstanding == 2
    await end(scene, exchange)
    await asyncio.sleep(0)  # lets done callbacks of the task run
    left = 0 if end is _late else 1
    assert scene.outstanding == left
    assert "server is let go" in scene.log
    told = len(scene.client.responses)
    # The client may disconnect at any time.
    exchange.cancel()
    assert scene.outstanding == left
    assert len(scene.client.responses) == told
    other.cancel()
    assert scene.outstanding == 0


@pytest.mark.parametrize("end", [_cancelled, _left, _left_before_it_ran])
async def test_disconnected_client_gets_nothing(end: End) -> None:
    scene = _Scene()
    await end(scene, scene.get())
    scene.clock.advance(1000)
    assert scene.client.responses == []
