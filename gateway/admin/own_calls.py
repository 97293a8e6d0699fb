"""Calls of the admin address to the gateway itself, as a client over a Unix socket makes them."""

from __future__ import annotations

import asyncio
import http
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.admin.source import GatewaySource
from gateway.errors import GatewayError
from gateway.observe.call_capture import CapturedMessage
from gateway.upstream.address import ConnectedAddress
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import UpstreamRequest, UpstreamResponse

_TIMEOUT = 10.0
"""Seconds for a call."""
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


class OwnCalls:
    """Makes calls to a gateway, with its routes and limits; each has a connection of its own."""

    def __init__(self, source: GatewaySource) -> None:
        self._source = source

    async def get_document(self, path: str) -> Any:
        """Return a JSON document. Raises OwnCallError."""
        return await self._document("GET", path, {}, None)

    async def post_document(self, path: str, document: object) -> Any:
        """Send a JSON document; return the one that comes back. Raises OwnCallError."""
        headers = {"Content-Type": "application/json"}
        return await self._document("POST", path, headers, (orjson.dumps(document),))

    async def _document(
        self, method: str, path: str, headers: Mapping[str, str], body: tuple[bytes, ...] | None
    ) -> Any:
        request = UpstreamRequest(method, path, CIMultiDict(headers), body)
        try:
            connection = await self._source.connect()
        except TimeoutError:
            raise OwnCallError("no worker responds") from None
        reply = await call_over(connection, request, _TIMEOUT, _MAX_DOCUMENT)
        try:
            document = orjson.loads(reply.body)
        except orjson.JSONDecodeError:
            document = None
        if reply.status != http.HTTPStatus.OK:
            error = document.get("error") if isinstance(document, dict) else None
            raise OwnCallError(error or f"the response has the status {reply.status}")
        if document is None:
            raise OwnCallError("the response is not JSON")
        return document


async def call_over(
    connection: socket.socket, request: UpstreamRequest, max_seconds: float, max_size: int
) -> Reply:
    """Make a call over a connection, and close that.

    Raises OwnCallError if there is no whole response of up to ``max_size`` bytes in time.
    """
    async with AsyncExitStack() as stack:
        stack.callback(connection.close)
        make_endpoint = Http2Endpoint if request.is_grpc else HttpEndpoint
        endpoint = make_endpoint(ConnectedAddress("the gateway", connection), _CONNECT_TIMEOUT)
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
