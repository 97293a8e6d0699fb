"""Heads that servers do not accept, the gateway's own requests, and errors of connects."""

import errno
import socket
import ssl

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import KSERVE, TRITON
from gateway.upstream.address import describe_for_clients, is_local_exhaustion
from gateway.upstream.control_client import ControlResponse, send_control_request
from gateway.upstream.transport import UpstreamRequest, check_lengths
from tests.support.http_messages import chunked, http_response, message
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.upstream.endpoints import EndpointAt

LONGEST = TRITON.max_head_part or 0


def _received(target: str = "/v2", **headers: str) -> UpstreamRequest:
    return UpstreamRequest("GET", target, CIMultiDict({"Host": "x", **headers}))


@pytest.mark.parametrize(
    "request_",
    [
        _received(),
        _received("/" * LONGEST),
        _received(a="x" * LONGEST),
        _received(**{"a" * 999: ""}),
    ],
)
def test_head_within_the_limit_of_a_server_passes(request_: UpstreamRequest) -> None:
    check_lengths(request_, TRITON)


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (_received("/" * (LONGEST + 1)), "the path and query has 8177 bytes"),
        (_received(a="x" * (LONGEST + 1)), "header a has 8177 bytes"),
        (_received(**{"a" * 9000: ""}), "the name of a header has 9000 bytes"),
    ],
)
def test_head_beyond_the_limit_of_a_server_is_refused(request_: UpstreamRequest, part: str) -> None:
    with pytest.raises(GatewayError) as caught:
        check_lengths(request_, TRITON)
    assert caught.value.kind.value.status == 400
    assert caught.value.message == f"{part}; the server takes at most {LONGEST}"
    check_lengths(request_, KSERVE)


async def test_response_is_buffered(endpoint_at: EndpointAt) -> None:
    head = {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"}
    data = message("HTTP/1.1 404 Not Found", head, chunked(b"no", b" such"))
    async with ScriptedServer(always_respond(data)) as server:
        document = await send_control_request(endpoint_at(server.url), "GET", "/x?y", 100)
        assert document == ControlResponse(404, "text/plain", b"no such")
        (received,) = server.requests
        assert received.head.first == "GET /x?y HTTP/1.1"
        assert received.head.get("Host") == server.url.removeprefix("http://")
        assert received.head.get("Content-Length") is None


async def test_request_with_a_body_is_json(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer() as server:
        document = await send_control_request(endpoint_at(server.url), "POST", "/x", 100, b"{}")
        assert document == ControlResponse(200, "application/json", b'{"outputs":[]}')
        (received,) = server.requests
        assert (received.body, received.head.get("Content-Type")) == (b"{}", "application/json")


async def test_response_larger_than_the_limit_fails(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer(always_respond(http_response(bytes(100)))) as server:
        endpoint = endpoint_at(server.url)
        assert len((await send_control_request(endpoint, "GET", "/x", 100)).body) == 100
        with pytest.raises(GatewayError) as caught:
            await send_control_request(endpoint, "GET", "/x", 99)
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert caught.value.message == f"the response of {server.url} to GET /x is larger than 99 bytes"


@pytest.mark.parametrize(
    ("error", "is_local"),
    [
        (OSError(errno.EMFILE, "why"), True),
        (OSError(errno.EADDRNOTAVAIL, "why"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), False),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), False),
        (UnicodeError("no host name"), False),
    ],
    ids=repr,
)
def test_only_exhausted_resources_are_local(error: Exception, is_local: bool) -> None:
    assert is_local_exhaustion(error) is is_local


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
