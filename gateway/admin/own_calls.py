"""Calls of the admin address to the gateway itself, as a client over a Unix socket makes them."""

from __future__ import annotations

import asyncio
import http
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.admin.source import GatewaySource
from gateway.errors import GatewayError
from gateway.observe.call_capture import CapturedMessage
from gateway.upstream.address import ConnectedAddress
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import UpstreamRequest, UpstreamResponse

_TIMEOUT, CAPTURED_TIMEOUT = 10.0, 120.0
"""Seconds for a call, and for one that an operator has composed."""
CAPTURE_TIMEOUT = 5.0
"""Seconds from its end until what was captured is here."""
MAX_CAPTURE = 4 * 2**20
_CONNECT_TIMEOUT = 5.0
_MAX_DOCUMENT = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to a call; ``captured`` is its begin, as the page shows it."""

    status: int
    """The HTTP status, or the one that stands for that of gRPC."""
    headers: CIMultiDictProxy[str]
    body: bytes
    grpc_message: str
    captured: CapturedMessage


class OwnCallError(Exception):
    """A call without the response that was asked for; the message says why, for operators."""


async def call_for_document(
    source: GatewaySource, method: str, path: str, document: object = None
) -> Any:
    """Make a call to a gateway, with its routes and limits; return the JSON document of it.

    A ``document`` is sent with it. Raises OwnCallError.
    """
    headers: CIMultiDict[str] = CIMultiDict()
    body = None
    if document is not None:
        headers["Content-Type"] = "application/json"
        body = (orjson.dumps(document),)
    try:
        connection = await source.connect()
    except TimeoutError:
        raise OwnCallError("no worker responds") from None
    request = UpstreamRequest(method, path, headers, body)
    reply = await _call_over(connection, request, _TIMEOUT, _MAX_DOCUMENT)
    try:
        found = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        found = None
    if reply.status != http.HTTPStatus.OK:
        error = found.get("error") if isinstance(found, dict) else None
        raise OwnCallError(error or f"the response has the status {reply.status}")
    if found is None:
        raise OwnCallError("the response is not JSON")
    return found


async def _call_over(
    connection: socket.socket, request: UpstreamRequest, max_seconds: float, max_size: int
) -> Reply:
    """Make a call over a connection, and close that.

    Raises OwnCallError if there is no whole response of up to ``max_size`` bytes in time.
    """
    async with AsyncExitStack() as stack:
        stack.callback(connection.close)
        make_endpoint = Http2Endpoint if request.is_grpc else HttpEndpoint
        endpoint = make_endpoint(
            ConnectedAddress("the gateway", connection), EndpointOptions(_CONNECT_TIMEOUT)
        )
        stack.push_async_callback(endpoint.close)
        try:
            async with asyncio.timeout(max_seconds):
                response = await endpoint.send(request)
                stack.callback(response.close)
                return await _read(response, request, max_size)
        except TimeoutError:
            raise OwnCallError(f"no response within {max_seconds:g} s") from None
        except GatewayError as error:
            raise OwnCallError(f"no response: {error}") from None


async def _read(response: UpstreamResponse, request: UpstreamRequest, max_size: int) -> Reply:
    captured = CapturedMessage.of_response(
        response.status, response.reason, response.headers, is_grpc=request.is_grpc
    )
    body = bytearray()
    while piece := await response.read():
        captured.add(piece)
        body += piece
        if len(body) > max_size:
            raise OwnCallError(f"the response has more than {max_size} bytes")
    captured.trailers = list(response.trailers)
    return Reply(
        response.final_status, response.headers, bytes(body), response.grpc_message, captured
    )


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A call that has ended."""

    seconds: float
    """From its begin to the end of its response."""
    reply: Reply
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
    with sink:
        began = time.perf_counter()
        reply = await _call_over(connection, request, CAPTURED_TIMEOUT, max_response)
        seconds = time.perf_counter() - began
        return CapturedCall(seconds, reply, await _read_capture(sink))


async def _read_capture(sink: socket.socket) -> list[dict[str, Any]]:
    """Read what was captured; nothing if it does not come."""
    loop = asyncio.get_running_loop()
    sink.setblocking(False)
    text = bytearray()
    try:
        async with asyncio.timeout(CAPTURE_TIMEOUT):
            while piece := await loop.sock_recv(sink, 256 * 1024):
                text += piece
                if len(text) > MAX_CAPTURE:
                    return []
        attempts = orjson.loads(text)
    except (OSError, orjson.JSONDecodeError):  # a TimeoutError is an OSError
        return []
    return list(attempts)
