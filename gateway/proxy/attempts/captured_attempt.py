"""Sends a request to an endpoint and captures both messages, as they are sent and read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from dataclasses import replace

from gateway.observe.call_capture import CallCapture, CapturedAttempt, CapturedMessage
from gateway.upstream.transport import (
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
    WrappedResponse,
    closed_on_error,
)

_CANCELLED = "cancelled: a timeout, or the client has closed the connection"


async def send_captured(
    endpoint: UpstreamEndpoint, request: UpstreamRequest, capture: CallCapture, upstream: str
) -> UpstreamResponse:
    """Send a request as ``UpstreamEndpoint.send`` does; ``upstream`` is the upstream's name."""
    head = (request.method, request.target, request.headers)
    sent = CapturedMessage.of_request(*head, is_grpc=request.is_grpc)
    attempt = capture.begin(upstream, endpoint.server_for(is_grpc=request.is_grpc).url, sent)
    body = request.body
    if isinstance(body, AsyncIterable):
        captured = _CapturedBody(body, sent)
        # A body that is an iterator cannot be read again, and must not seem to.
        is_read_once = isinstance(body, AsyncIterator)
        request = replace(request, body=aiter(captured) if is_read_once else captured)
    else:
        for piece in body or ():
            sent.add(piece)
    try:
        response = await endpoint.send(request)
    except BaseException as error:
        attempt.error = _describe(error)
        raise
    with closed_on_error(response):
        attempt.response = CapturedMessage.of_response(
            response.status, response.reason, response.headers, is_grpc=request.is_grpc
        )
        return _CapturedResponse(response, attempt, attempt.response)


def _describe(error: BaseException) -> str:
    """Return why an attempt failed: the gateway cancels what takes too long."""
    if isinstance(error, asyncio.CancelledError):
        return _CANCELLED
    return str(error) or type(error).__name__


class _CapturedBody:
    """A streamed body, captured while it is read."""

    def __init__(self, body: AsyncIterable[bytes | memoryview], message: CapturedMessage) -> None:
        self._body = body
        self._message = message

    async def __aiter__(self) -> AsyncGenerator[bytes | memoryview]:
        self._message.restart()
        async for piece in self._body:
            self._message.add(piece)
            yield piece


class _CapturedResponse(WrappedResponse):
    """A response, captured while it is read."""

    def __init__(
        self, response: UpstreamResponse, attempt: CapturedAttempt, message: CapturedMessage
    ) -> None:
        super().__init__(response)
        self._attempt = attempt
        self._message = message

    async def read(self) -> bytes | memoryview:
        """Return the next chunk of the body."""
        try:
            piece = await self._response.read()
        except BaseException as error:
            self._attempt.error = _describe(error)
            raise
        self._message.add(piece)
        if not piece:
            self._message.trailers = list(self._response.trailers)
        return piece
