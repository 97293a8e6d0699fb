"""Which route a request takes, what becomes of it there, and the errors of requests without one."""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import OPERATION_KINDS, Operation, OperationKind
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.calls.planner import Planner
from gateway.proxy.filters.authentication import KeyGroup
from gateway.proxy.router import Rewrite, Route, Router
from gateway.routing.balancer import choose_by_weight, hash_to_fraction
from gateway.routing.matcher import Match, Pattern
from gateway.upstream.pool.checks import ModelDiscovery, PoolSupervisor
from tests.proxy.calls.scene import start
from tests.support.doubles.cluster import one_upstream, send_request
from tests.support.doubles.fast_path import ReadyEndpoint, ScriptedClient
from tests.support.doubles.streaming import (
    LIMITS,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
    ready,
    single_destination,
)
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    json_request,
    metadata,
)

OK = ScriptedUpstreamResponse(200, {}, [b'{"outputs":[]}'])


def _headers(headers: dict[str, str] | None = None) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(headers or {}))


def _model(pattern: str) -> Match:
    return Match(model=Pattern.of(pattern))


def _kinds(*words: str) -> frozenset[OperationKind]:
    return frozenset(kind for word in words for kind in OPERATION_KINDS[word])


def _find_error(router: Router, method: str, target: str) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        router.find(method, target, _headers())
    return caught.value


def _scripted(numbers: Iterable[float]) -> Callable[[], float]:
    return iter(numbers).__next__


# -------------------------------------------------------------------------------- denied operations


async def test_denied_operation_is_not_matched_by_later_rules() -> None:
    destination = make_destination(ScriptedEndpoint(EventLog()))
    deny = _kinds("repository", "shared_memory")
    router = Router(
        [
            Route(_model("m"), (destination,), denied_kinds=deny),
            Route(Match(), (destination,), denied_kinds=deny),
        ]
    )
    for method, target, word in [
        ("POST", "/v2/repository/models/m/load", "repository"),
        ("GET", "/v2/cudasharedmemory/status", "shared_memory"),
        # The reading of a server that decodes paths.
        ("POST", "/v2/%72epository/index", "repository"),
        ("POST", "/v2/repository/models/x/%6Coad?x", "repository"),
    ]:
        error = _find_error(router, method, target)
        assert error.kind is ErrorKind.FORBIDDEN
        assert error.message == f"operation '{word}' is denied on this route"
    assert router.find("POST", INFER, _headers()).target == INFER


def _outcome(router: Router, method: str, target: str, key: str | None = None) -> str:
    headers = _headers({"Authorization": f"Bearer {key}"} if key else {})
    try:
        found = router.find(method, target, headers)
    except GatewayError as error:
        return str(error.kind.value.status)
    return found.choice.take().upstream.name


def _guarded() -> Router:
    """Rules that deny, need a key, and are open last; or open first without a model."""
    names = ("denying", "keyed", "metadata", "named", "open")
    to = {name: (make_destination(ReadyEndpoint(), name=name),) for name in names}
    return Router(
        [
            Route(_model("d*"), to["denying"], denied_kinds=_kinds("infer")),
            Route(_model("k"), to["keyed"], keys=(KeyGroup("g", None, ["key"]),)),
            Route(Match(kinds=_kinds("metadata")), to["metadata"]),
            Route(_model("[!k]* é"), to["named"]),
            Route(Match(), to["open"], denied_kinds=_kinds("repository")),
        ]
    )


@pytest.mark.parametrize(
    ("method", "target", "outcome", "with_key"),
    [
        ("POST", "/v2/models/k/infer", "401", "keyed"),
        ("POST", "/v1/models/%6B:predict", "401", "keyed"),
        ("POST", "/v2/models/x%20%C3%A9/infer", "named", "named"),
        ("POST", "/v2/models/%C3%A9/infer", "open", "open"),
        # One reading is the model with a key, another is elsewhere.
        ("POST", "/v2/models/k%2Finfer", "401", "404"),
        ("POST", "//v2/models/k/infer", "401", "404"),
        # All readings match one rule, and one of them is denied.
        ("POST", "/v2/models/d%2Finfer", "403", "403"),
        ("POST", "/v2/models/d/infer/", "403", "403"),
        # A rule for metadata serves only metadata.
        ("GET", "/v2/models/x%2Fconfig", "401", "404"),
        # Readings of one rule, none denied, pass untouched.
        ("POST", "/v2//x/", "open", "open"),
    ],
)
async def test_ambiguous_path_matches_only_if_all_readings_agree(
    method: str, target: str, outcome: str, with_key: str
) -> None:
    router = _guarded()
    assert _outcome(router, method, target) == outcome
    assert _outcome(router, method, target, "key") == with_key


# ------------------------------------------------------------------------------------------ weights


def _start(planner: Planner, headers: dict[str, str] | None = None) -> bool:
    return start(planner, "GET", "/v2/x", headers or {}, b"", ScriptedClient()) is not None


async def test_plan_chooses_an_upstream_for_each_request() -> None:
    one, two = ReadyEndpoint(), ReadyEndpoint()
    route = Route(
        Match(), (make_destination(one), make_destination(two)), (3, 1), sticky_header="x-user"
    )
    planner = Planner(Router([route], _scripted([0.0, 0.8, 0.1, 0.9, 0.2])))
    asked = []
    for _ in range(4):
        assert _start(planner)
        asked.append((len(one.asked), len(two.asked)))
    assert asked == [(1, 0), (1, 1), (2, 1), (2, 2)]
    users = [str(i) for i in range(20)]
    for user in users:
        before = len(one.asked), len(two.asked)
        for _ in range(2):
            assert _start(planner, {"X-User": user})
        after = len(one.asked), len(two.asked)
        stays = choose_by_weight((3, 4), hash_to_fraction(user))
        assert after[stays] == before[stays] + 2


async def test_weights_hold_if_one_upstream_never_takes_the_fast_path() -> None:
    """The choice for a call that leaves the fast path holds on the streaming path."""
    ready, unready = ReadyEndpoint(), ReadyEndpoint()
    unready.ready = False
    one, two = make_destination(ready), make_destination(unready)
    numbers = [hash_to_fraction(str(i)) for i in range(10_000)]
    router = Router([Route(Match(), (one, two), (90, 10))], _scripted(numbers))
    planner = Planner(router)
    taken: Counter[str] = Counter()
    for _ in range(5000):
        if _start(planner):
            taken["one"] += 1
        else:
            chosen = router.find("GET", "/v2/x", _headers()).choice.take()
            taken["one" if chosen is one else "two"] += 1
    expected = Counter("two" if choose_by_weight((90, 100), n) else "one" for n in numbers[:5000])
    assert taken == expected


# ------------------------------------------------------------------------------------------ rewrite


def _alias(
    *steps: ScriptedUpstreamResponse, version: str | None = None
) -> tuple[ScriptedEndpoint, Router]:
    endpoint = ScriptedEndpoint(EventLog(), *steps)
    route = Route(Match(), (make_destination(endpoint),), rewrite=Rewrite("resnet50", version))
    return endpoint, Router([route])


@pytest.mark.parametrize("version", [None, "3"])
@pytest.mark.parametrize(
    ("method", "target", "sent", "sent_with_version"),
    [
        (
            "POST",
            "/v2/models/m/infer?x=m",
            "/v2/models/resnet50/infer?x=m",
            "/v2/models/resnet50/versions/3/infer?x=m",
        ),
        # Triton keeps trace settings per model.
        (
            "GET",
            "/v2/models/m/versions/1/trace?q",
            "/v2/models/resnet50/trace/setting?q",
            "/v2/models/resnet50/trace/setting?q",
        ),
        ("POST", "/v2/repository/models/m/load", *["/v2/repository/models/resnet50/load"] * 2),
        ("GET", "/v2", "/v2", "/v2"),
    ],
)
async def test_rewrite_replaces_the_model(
    method: str, target: str, sent: str, sent_with_version: str, version: str | None
) -> None:
    endpoint, router = _alias(OK, version=version)
    body = [json_request()] if target.partition("?")[0].endswith("/infer") else []
    response = ScriptedClientResponse(EventLog())
    request = ScriptedRequest(EventLog(), method, target, {}, body)
    await handle_request(request, response, Planner(router))
    assert response.status == 200
    assert [each.target for each in endpoint.requests] == [sent_with_version if version else sent]


@pytest.mark.parametrize(
    "target",
    [
        "/v2%2Fmodels/secret/infer",
        "/v2/models/m/%2e%2e/secret/infer",
        "/v2/repository/models%2Fsecret/load",
    ],
)
async def test_rewrite_replaces_the_model_in_every_spelling(target: str) -> None:
    _, router = _alias(version="3")
    assert _find_error(router, "POST", target).kind is ErrorKind.NOT_FOUND
    found = router.find("POST", "/v2/models/%6D%2Fx/infer", _headers())
    assert found.target == "/v2/models/resnet50/versions/3/infer"
    assert found.operation == Operation(OperationKind.INFER, "resnet50", "3")


@pytest.mark.parametrize(
    ("rpc", "rewritten"),
    [
        (Operation(OperationKind.INFER, "m", "1"), Operation(OperationKind.INFER, "new%2F", "3")),
        # A later message of a stream might name a model.
        (Operation(OperationKind.INFER), Operation(OperationKind.INFER, "new%2F", "3")),
        (Operation(OperationKind.ALL_STATISTICS), None),
    ],
)
async def test_route_match_of_a_grpc_call_has_the_rewrite_of_its_messages(
    rpc: Operation, rewritten: Operation | None
) -> None:
    rewrite = Rewrite("new%2F", "3")
    router = Router([Route(Match(), (make_destination(ReadyEndpoint()),), rewrite=rewrite)])
    found = router.find("POST", "/inference.GRPCInferenceService/Any", _headers(), (rpc,))
    assert found.operation == (rewritten or rpc)
    assert found.rewrite == (rewrite if rewritten else None)


# ------------------------------------------------------------------------ upstreams and passthrough


async def test_route_match_has_the_upstreams_of_its_operation() -> None:
    one, two, three, four = (
        make_destination(ReadyEndpoint(), name=name) for name in ("one", "two", "three", "four")
    )
    router = Router(
        [
            Route(_model("m"), (two, one, two), (1, 1, 1)),
            Route(_model("n"), (three,), denied_kinds=_kinds("repository")),
            Route(Match(), (one, four), (1, 0)),
        ],
        lambda: 0.0,
    )
    for method, target, names in [
        ("POST", "/v2/repository/models/m/load", "two one"),
        ("GET", "/v2/models/n/trace", "three"),
        ("POST", "/v2/trace", "one"),
        ("GET", "/v2", "one"),
        ("GET", "/v2/models/stats", "two one three"),
        ("POST", "/v2/repository/index", "two one"),
        ("PUT", "/v2/repository/index", "one"),
    ]:
        found = router.find(method, target, _headers())
        assert " ".join(upstream.name for upstream in found.upstreams) == names, target
    assert router.readiness.names == ["two", "one", "three"]


@pytest.mark.parametrize(
    ("method", "target", "forwarded"),
    [
        ("GET", "/v2/models/m/ready", "one, alike, two"),
        ("POST", "/v2/repository/index", "one, alike"),
        ("GET", "/v2/models/stats", "one"),
        ("POST", "/v2/logging", "one"),
        ("POST", INFER, ""),
        ("GET", "/v2", ""),
        ("GET", "/v2/health/ready", ""),
    ],
)
async def test_route_match_tells_what_passes_through(
    method: str, target: str, forwarded: str
) -> None:
    a, b = (ReadyEndpoint(url=url) for url in ("http://a", "http://b"))
    told = []
    for name, choices in {
        "one": (make_destination(a),),
        "alike": (make_destination(a, b),),
        "two": (make_destination(a), make_destination(b)),
    }.items():
        router = Router([Route(Match(), choices, (1,) * len(choices))])
        if router.find(method, target, _headers()).is_passthrough:
            told.append(name)
    assert ", ".join(told) == forwarded


METADATA = ScriptedUpstreamResponse(200, {}, [metadata(-1)])
NO_CONFIG = ScriptedUpstreamResponse(404)
RAW = {HEADER_LENGTH: "0"}


@pytest.mark.parametrize("kind", list(ErrorKind))
async def test_gateway_error_becomes_an_error_response(kind: ErrorKind) -> None:
    cluster = one_upstream(a=GatewayError(kind, "what “went” wrong"))
    response = await cluster.ask("GET", "/v2/x")
    assert response.status == kind.value.status
    assert response.body.decode() == '{"error":"what “went” wrong"}'
    accepted = kind is ErrorKind.UNSUPPORTED_ENCODING
    assert dict(response.headers) == {
        "Content-Type": "application/json",
        "Content-Length": str(len(response.body)),
        **({"Accept-Encoding": "gzip, deflate"} if accepted else {}),
    }
    assert cluster.log[-1] == "client has got all"


async def test_client_that_does_not_read_an_error_is_aborted() -> None:
    limits = replace(LIMITS, idle_timeout=0.02)
    cluster = one_upstream(limits=limits, a=ScriptedUpstreamResponse(404, {}, [bytes(1000)]))
    response = ScriptedClientResponse(cluster.log, ready=asyncio.Event())
    request = ScriptedRequest(cluster.log, "POST", INFER, RAW, [bytes(4)])
    await handle_request(request, response, Planner(cluster.router))
    assert cluster.log[-2:] == ["client gets 404", "client is cut off"]


VERSION = "/v2/models/m/versions/2"


@pytest.mark.parametrize("models", [("n", "m", "o"), ("m/1", "m/2", "m/3")])
@pytest.mark.parametrize(
    ("method", "target", "body", "headers"),
    [
        ("GET", VERSION, b"", {}),
        ("POST", VERSION + "/infer", json_request(), {}),
        (
            "POST",
            VERSION + "/infer",
            binary_header(8) + bytes(8),
            {HEADER_LENGTH: str(len(binary_header(8)))},
        ),
        ("POST", VERSION + "/infer", bytes(4), RAW),
        ("POST", VERSION + "/generate", gzip.compress(b"{}"), {"Content-Encoding": "gzip"}),
    ],
)
async def test_call_for_a_model_goes_to_an_endpoint_that_has_it(
    models: Sequence[str], method: str, target: str, body: bytes, headers: dict[str, str]
) -> None:
    responses = (METADATA, NO_CONFIG, *[OK] * 3) if headers == RAW else (OK,) * 3
    turns: dict[str, Any] = dict.fromkeys("abc", responses)
    cluster = one_upstream(discovers_models=True, **turns)
    members = cluster.destinations[0].upstream.pool.members
    for member, model in zip(members, models, strict=True):
        member.models = ready(model)
    for _ in range(3):
        steps = (body,) if body else ()
        assert (await cluster.ask(method, target, *steps, headers=headers)).status == 200
    assert [bool(each) for each in cluster.received] == [False, True, False]


async def test_load_and_unload_refresh_the_model_discovery() -> None:
    asked: list[str] = []

    class Noting(ModelDiscovery):
        def refresh_models(self) -> None:
            asked.append("again")

    endpoint = ScriptedEndpoint(EventLog(), ScriptedUpstreamResponse(400), OK)
    router = single_destination(
        make_destination(endpoint, supervisor=PoolSupervisor(model_discovery=Noting(60)))
    )
    for method, target in (("POST", "/v2/repository/models/m/load"), ("GET", "/v2/models/m")):
        await send_request(router, method, target)
        assert asked == ["again"]


@pytest.mark.parametrize("target", [INFER, "/v1/models/m:predict", "/v2/models/m/generate"])
async def test_body_is_not_read_if_the_upstream_has_no_endpoint(target: str) -> None:
    log, router = EventLog(), single_destination(make_destination())
    response = await send_request(router, "POST", target, json_request(), log=log)
    assert response.status == 503
    assert b"the upstream has no endpoint" in response.body
    assert log.count_of("client sends") == 0


async def test_requests_of_the_gateway_itself_take_no_slots() -> None:
    limit = ConcurrencyLimit("the gateway", 1, 0, 1.0)
    endpoint = ScriptedEndpoint(EventLog(), METADATA, NO_CONFIG, OK)
    destination = replace(make_destination(endpoint), concurrency_limits=(limit,))
    router = single_destination(destination)
    assert (await send_request(router, "POST", INFER, bytes(4), headers=RAW)).status == 200
    assert len(endpoint.requests) == 3
    assert limit.active == 0
