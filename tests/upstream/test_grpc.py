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


OF_HTTP, OF_GRPC = InferenceProtocol(), InferenceProtocol(has_http=False, has_grpc=True)
SLOW_JSON = replace(JSON, faster_over_grpc=False)


@pytest.mark.parametrize(
    ("protocol", "dialect", "name", "reason"),
    [
        (BOTH, TRITON, "http", "dialect triton takes binary tensors over HTTP"),
        (BOTH, KSERVE, "grpc", "dialect kserve is faster over gRPC"),
        (BOTH, SLOW_JSON, "http", "dialect json is not known to be faster over gRPC"),
        (BOTH, None, None, "the dialect is not known"),
        (replace(BOTH, setting="http"), KSERVE, "http", "configured"),
        (replace(BOTH, setting="grpc"), None, "grpc", "configured"),
        (OF_HTTP, KSERVE, "http", "the endpoints have no gRPC address"),
        (OF_GRPC, None, "grpc", "the endpoints have no HTTP address"),
    ],
)
def test_addresses_and_setting_decide_before_the_dialect(
    protocol: InferenceProtocol, dialect: Dialect | None, name: str | None, reason: str
) -> None:
    assert (protocol.name(dialect), protocol.reason(dialect)) == (name, reason)
    if dialect is not None:
        shown = "gRPC" if name == "grpc" else "HTTP"
        has_choice = protocol not in (OF_HTTP, OF_GRPC)
        assert protocol.describe(dialect) == f"inference over {shown}: {reason}" * has_choice


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
    monkeypatch.setattr(outlier_detection, "PROBE_INTERVAL", 0.01)
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
    monkeypatch.setattr(outlier_detection, "PROBE_INTERVAL", 0.01)
    endpoint = _endpoint()
    pool = Pool([endpoint], upstream="u")
    await pool.start()
    fail_calls(pool, 0, GatewayError(ErrorKind.UNREACHABLE, f"cannot connect to {HTTP}"), times=3)
    await until(lambda: pool.unreachable is None)
    await pool.close()
    assert _requests(endpoint) == [1, 0]
