"""Heads that servers do not accept, own requests, errors of connects, endpoints over gRPC."""

from __future__ import annotations

import errno
import socket
import ssl
from dataclasses import replace

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import JSON, KSERVE, TRITON, Dialect
from gateway.upstream.address import describe_for_clients
from gateway.upstream.control_client import ControlResponse, send_control_request
from gateway.upstream.grpc.choices import GrpcCancellation, InferenceProtocol, drains_cancelled
from gateway.upstream.grpc.endpoint import DualEndpoint
from gateway.upstream.pool import outlier_detection
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.pool import Pool
from gateway.upstream.transport import UpstreamRequest, check_lengths
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint, ScriptedUpstreamResponse
from tests.support.gateway import until
from tests.support.http_messages import chunked, http_response, message
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.upstream.endpoints import EndpointAt
from tests.upstream.pools import fail_calls

LONGEST = TRITON.max_head_part or 0


def _received(target: str = "/v2", **headers: str) -> UpstreamRequest:
    return UpstreamRequest("GET", target, CIMultiDict({"Host": "x", **headers}))


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (_received("/" * LONGEST), ""),
        (_received(a="x" * LONGEST), ""),
        (_received(**{"a" * 999: ""}), ""),
        (_received("/" * (LONGEST + 1)), "the path and query has 8177 bytes"),
        (_received(a="x" * (LONGEST + 1)), "header a has 8177 bytes"),
        (_received(**{"a" * 9000: ""}), "the name of a header has 9000 bytes"),
    ],
)
def test_head_beyond_the_limit_of_a_server_is_refused(request_: UpstreamRequest, part: str) -> None:
    if not part:
        check_lengths(request_, TRITON)
        return
    with pytest.raises(GatewayError) as caught:
        check_lengths(request_, TRITON)
    assert caught.value.kind.value.status == 400
    assert caught.value.message == f"{part}; the server takes at most {LONGEST}"
    check_lengths(request_, KSERVE)


async def test_response_is_buffered(endpoint_at: EndpointAt) -> None:
    head = {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"}
    data = message("HTTP/1.1 404 Not Found", head, chunked(b"no", b" such"))
    async with ScriptedServer(always_respond(data)) as server:
        document = await send_control_request(endpoint_at(server.url), "/x?y", 100)
        assert document == ControlResponse(404, "text/plain", b"no such")
        (received,) = server.requests
        assert received.head.first == "GET /x?y HTTP/1.1"
        assert received.head.get("Host") == server.url.removeprefix("http://")
        assert received.head.get("Content-Length") is None


async def test_response_larger_than_the_limit_fails(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer(always_respond(http_response(bytes(100)))) as server:
        endpoint = endpoint_at(server.url)
        assert len((await send_control_request(endpoint, "/x", 100)).body) == 100
        with pytest.raises(GatewayError) as caught:
            await send_control_request(endpoint, "/x", 99)
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert caught.value.message == f"the response of {server.url} to GET /x is larger than 99 bytes"


async def test_timeout_from_within_is_not_taken_for_that_of_the_request() -> None:
    with pytest.raises(TimeoutError, match="from within"):
        await send_control_request(
            ScriptedEndpoint(EventLog(), TimeoutError("from within")), "/x", 100
        )


def _mismatch() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate is not valid for 'triton.internal'")
    error.verify_code = 62
    error.verify_message = "Hostname mismatch, certificate is not valid for 'triton.internal'"
    return error


def _distrust() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code = 18
    error.verify_message = "self-signed certificate"
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "10.0.0.1"), "Connection refused"),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed ('10.0.0.1', 8000)"),
            "no connection",
        ),
        (TimeoutError(), "no connection in time"),
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "Name or service not known",
        ),
        (_mismatch(), "its certificate is for another name"),
        (_distrust(), "its certificate is not trusted (self-signed certificate)"),
        (UnicodeError("label 'triton-internal' too long"), "no connection"),
        (ConnectionResetError(), "it closed the connection within the TLS handshake"),
    ],
    ids=repr,
)
def test_clients_learn_no_address_from_connect_errors(error: Exception, told: str) -> None:
    assert describe_for_clients(error) == told


@pytest.mark.parametrize(
    ("setting", "dialect", "drains"),
    [
        ("auto", TRITON, True),
        ("auto", KSERVE, False),
        ("auto", None, True),
        ("forward", None, False),
        ("drain", KSERVE, True),
    ],
)
def test_setting_decides_before_the_dialect(
    setting: GrpcCancellation, dialect: Dialect | None, drains: bool
) -> None:
    assert drains_cancelled(setting, dialect) is drains


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


async def test_both_addresses_are_closed_and_drained_calls_of_grpc_count() -> None:
    log = EventLog()
    http, grpc = (ScriptedEndpoint(log, url=url) for url in (HTTP, GRPC))
    grpc.drain_counters = []
    member = Member(DualEndpoint(http, grpc))
    assert grpc.drain_counters == [member]
    await member.endpoint.close()
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
