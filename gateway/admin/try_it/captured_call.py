"""Makes a call to the gateway itself, and gets what the gateway and its servers sent for it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import orjson
from multidict import CIMultiDictProxy

from gateway.admin.own_calls import OwnCallError
from gateway.admin.source import GatewaySource
from gateway.errors import GatewayError, bad_response
from gateway.observe.call_capture import CapturedMessage
from gateway.upstream.address import ConnectedAddress
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import UpstreamRequest, UpstreamResponse

_TIMEOUT = 120.0
"""Seconds for a call."""
_CAPTURE_TIMEOUT = 5.0
"""Seconds from its end until what was captured is here."""
_CONNECT_TIMEOUT = 5.0
_MAX_CAPTURE = 4 * 2**20
_PEER = "the gateway"


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A call that has ended."""

    seconds: float
    """From its begin to the end of its response."""
    status: int
    """The HTTP status, or the one that stands for that of gRPC."""
    headers: CIMultiDictProxy[str]
    body: bytes
    grpc_message: str
    response: CapturedMessage
    attempts: list[dict[str, Any]]
    """What was sent to servers and received of them; see CapturedAttempt."""


async def make_captured_call(
    source: GatewaySource,
    request: UpstreamRequest,
    max_response: int,
    skips_conversion: bool = False,
) -> CapturedCall:
    """Make a call over a connection of its own. Raises OwnCallError.

    Its route, its limits and its log are those of any other call. With ``skips_conversion`` a
    server gets it as it is.
    """
    try:
        connection, sink = await source.connect_captured(skips_conversion)
    except TimeoutError:
        raise OwnCallError("no worker responds") from None
    async with AsyncExitStack() as stack:
        stack.callback(connection.close)
        stack.callback(sink.close)
        address = ConnectedAddress(_PEER, connection)
        make_endpoint = Http2Endpoint if request.is_grpc else HttpEndpoint
        endpoint = make_endpoint(address, _CONNECT_TIMEOUT)
        stack.push_async_callback(endpoint.close)
        began = time.perf_counter()
        try:
            async with asyncio.timeout(_TIMEOUT):
                response = await endpoint.send(request)
                stack.callback(response.close)
                body, captured = await _read(response, request.is_grpc, max_response)
        except TimeoutError:
            raise OwnCallError(f"no response within {_TIMEOUT:g} s") from None
        except GatewayError as error:
            raise OwnCallError(str(error)) from None
        seconds = time.perf_counter() - began
        attempts = await _read_capture(sink)
    return CapturedCall(
        seconds,
        response.outcome,
        response.headers,
        body,
        response.grpc_message,
        captured,
        attempts,
    )


async def _read(
    response: UpstreamResponse, is_grpc: bool, max_size: int
) -> tuple[bytes, CapturedMessage]:
    version = "HTTP/2" if is_grpc else "HTTP/1.1"
    start = f"{version} {response.status} {response.reason}".rstrip()
    captured = CapturedMessage(start, response.headers.items())
    body = bytearray()
    while piece := await response.read():
        captured.add(piece)
        body += piece
        if len(body) > max_size:
            raise bad_response(f"the response has more than {max_size >> 20} MiB")
    captured.trailers = list(response.trailers)
    return bytes(body), captured


async def _read_capture(sink: socket.socket) -> list[dict[str, Any]]:
    """Read what was captured; nothing if it does not come."""
    loop = asyncio.get_running_loop()
    sink.setblocking(False)
    text = bytearray()
    try:
        async with asyncio.timeout(_CAPTURE_TIMEOUT):
            while piece := await loop.sock_recv(sink, 256 * 1024):
                text += piece
                if len(text) > _MAX_CAPTURE:
                    return []
        attempts = orjson.loads(text)
    except (OSError, orjson.JSONDecodeError):  # a TimeoutError is an OSError
        return []
    return list(attempts)


def describe_request(request: UpstreamRequest, max_body: int) -> dict[str, Any]:
    """Return a buffered request as the page shows it."""
    version = "HTTP/2" if request.is_grpc else "HTTP/1.1"
    start = f"{request.method} {request.target} {version}"
    message = CapturedMessage(start, request.headers.items(), max_body)
    assert isinstance(request.body, Sequence)
    for piece in request.body:
        message.add(piece)
    return message.describe()
