"""How an upstream uses gRPC, and endpoints with two addresses."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import JSON, KSERVE, TRITON, Dialect
from gateway.settings.upstreams import Upstream
from gateway.upstream.grpc.choices import GrpcCancellation, InferenceProtocol, drains_cancelled
from gateway.upstream.grpc.endpoint import DualEndpoint
from gateway.upstream.pool import outlier_detection
from gateway.upstream.pool.pool import Pool
from gateway.upstream.transport import UpstreamRequest
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint, ScriptedUpstreamResponse
from tests.support.gateway import until
from tests.upstream.pools import fail_calls


@pytest.mark.parametrize(
    ("setting", "dialect", "drains"),
    [
        ("auto", TRITON, True),
        ("auto", KSERVE, False),
        ("auto", None, True),
        ("forward", TRITON, False),
        ("forward", None, False),
        ("drain", KSERVE, True),
    ],
)
def test_setting_decides_before_the_dialect(
    setting: GrpcCancellation, dialect: Dialect | None, drains: bool
) -> None:
    assert drains_cancelled(setting, dialect) is drains


def test_settings_have_the_same_words() -> None:
    field = Upstream.model_fields["grpc_cancellation"]
    assert get_args(field.annotation) == get_args(GrpcCancellation)


BOTH = InferenceProtocol(has_http=True, has_grpc=True)


@pytest.mark.parametrize(
    ("dialect", "name", "reason"),
    [
        (TRITON, "http", "dialect triton takes binary tensors over HTTP"),
        (KSERVE, "grpc", "dialect kserve is faster over gRPC"),
        (
            replace(JSON, faster_over_grpc=False),
            "http",
            "dialect json is not known to be faster over gRPC",
        ),
        (None, None, "the dialect is not known"),
    ],
)
def test_dialect_decides_for_endpoints_with_both_addresses(
    dialect: Dialect | None, name: str | None, reason: str
) -> None:
    assert (BOTH.name(dialect), BOTH.reason(dialect)) == (name, reason)


@pytest.mark.parametrize("dialect", [TRITON, KSERVE, None])
def test_setting_decides_whatever_the_dialect(dialect: Dialect | None) -> None:
    for name in ("http", "grpc"):
        configured = replace(BOTH, setting=name)
        assert (configured.name(dialect), configured.reason(dialect)) == (name, "configured")


@pytest.mark.parametrize("dialect", [TRITON, KSERVE, None])
def test_single_address_leaves_no_choice(dialect: Dialect | None) -> None:
    http, grpc = InferenceProtocol(), InferenceProtocol(has_http=False, has_grpc=True)
    assert (http.name(dialect), http.reason(dialect)) == (
        "http",
        "the endpoints have no gRPC address",
    )
    assert (grpc.name(dialect), grpc.reason(dialect)) == (
        "grpc",
        "the endpoints have no HTTP address",
    )
    assert http.describe(TRITON) == grpc.describe(TRITON) == ""


def test_choice_is_described_for_the_log() -> None:
    assert BOTH.describe(KSERVE) == "inference over gRPC: dialect kserve is faster over gRPC"
    assert replace(BOTH, setting="http").describe(KSERVE) == "inference over HTTP: configured"


HTTP, GRPC = "http://a:8000", "grpc://a:8001"


def _request(is_grpc: bool = False) -> UpstreamRequest:
    # Whatever its headers say: a client writes them.
    headers = CIMultiDict({"content-type": "application/json" if is_grpc else "application/grpc"})
    return UpstreamRequest("POST", "/x", headers, (b"",), is_grpc=is_grpc)


def _endpoint(*grpc_turns: ScriptedUpstreamResponse | BaseException, http: int = 1) -> DualEndpoint:
    turns = [ScriptedUpstreamResponse(200) for _ in range(http)]
    return DualEndpoint(
        ScriptedEndpoint(EventLog(), *turns, url=HTTP),
        ScriptedEndpoint(EventLog(), *grpc_turns, url=GRPC),
    )


def _requests(endpoint: DualEndpoint) -> list[int]:
    """Return the number of requests to each address."""
    counts = []
    for address in endpoint.addresses:
        assert isinstance(address, ScriptedEndpoint)
        counts.append(len(address.requests))
    return counts


@pytest.mark.parametrize(("is_grpc", "url"), [(False, HTTP), (True, GRPC)])
async def test_grpc_call_goes_to_the_grpc_address(is_grpc: bool, url: str) -> None:
    endpoint = _endpoint(ScriptedUpstreamResponse(200))
    request = _request(is_grpc)
    assert endpoint.server_for(is_grpc=request.is_grpc).url == url
    await endpoint.send(request)
    assert _requests(endpoint) == ([0, 1] if is_grpc else [1, 0])


def test_endpoint_is_named_by_its_http_address() -> None:
    endpoint = _endpoint()
    assert (endpoint.url, endpoint.name.url) == (HTTP, HTTP)
    assert [address.url for address in endpoint.addresses] == [HTTP, GRPC]
    (state,) = Pool([endpoint]).snapshot()
    assert (state.url, state.grpc_url) == (HTTP, GRPC)


async def test_both_addresses_are_closed() -> None:
    log = EventLog()
    both = [ScriptedEndpoint(log, url=url) for url in (HTTP, GRPC)]
    await DualEndpoint(*both).close()
    assert log == ["server is left"] * 2


async def test_upstream_is_reachable_again_when_the_address_that_failed_responds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outlier_detection, "_PROBE_INTERVAL", 0.01)
    error = GatewayError(ErrorKind.UNREACHABLE, f"cannot connect to {GRPC}")
    endpoint = _endpoint(error, error, error, ScriptedUpstreamResponse(200), http=3)
    with pytest.raises(GatewayError):
        await endpoint.send(_request(is_grpc=True))
    pool = Pool([endpoint], upstream="u")
    await pool.start()
    fail_calls(pool, 0, error, times=3)
    assert pool.unreachable is not None
    await until(lambda: pool.unreachable is None)
    await pool.close()
    assert _requests(endpoint) == [3, 4]


async def test_grpc_address_that_is_not_used_need_not_respond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outlier_detection, "_PROBE_INTERVAL", 0.01)
    endpoint = _endpoint()
    pool = Pool([endpoint], upstream="u")
    await pool.start()
    fail_calls(pool, 0, GatewayError(ErrorKind.UNREACHABLE, f"cannot connect to {HTTP}"), times=3)
    await until(lambda: pool.unreachable is None)
    await pool.close()
    assert _requests(endpoint) == [1, 0]
