"""Requests to endpoints, and their responses read whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

from multidict import CIMultiDict

from gateway.upstream.transport import (
    Body,
    HeaderLines,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)


@dataclass(frozen=True)
class Reply:
    """A response, whole."""

    status: int
    headers: dict[str, str]
    body: bytes
    trailers: HeaderLines


def make_request(
    body: Body = None,
    headers: dict[str, str] | None = None,
    target: str = "/x",
    method: str = "POST",
) -> UpstreamRequest:
    """Make a request."""
    return UpstreamRequest(method, target, CIMultiDict(headers or {}), body)


async def pieces(*parts: bytes | BaseException) -> AsyncIterator[bytes]:
    """Give the pieces of a body, which may fail."""
    for part in parts:
        if isinstance(part, BaseException):
            raise part
        yield part


class Repeatable(AsyncIterable[bytes]):
    """A streamed body that can be read again from the start."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[bytes]:
        return pieces(*self._parts)


async def read_whole(response: UpstreamResponse) -> bytes:
    """Read the body of a response, and close it."""
    try:
        body, before = bytearray(), response.received_bytes
        async with asyncio.timeout(30):
            while piece := await response.read():
                body += piece
        assert response.received_bytes == before + len(body)
        return bytes(body)
    finally:
        response.close()


async def read_reply(response: UpstreamResponse) -> Reply:
    """Read a response to its end, and close it."""
    body = await read_whole(response)
    return Reply(response.status, dict(response.headers), body, response.trailers)


async def ask(endpoint: UpstreamEndpoint, request: UpstreamRequest | None = None) -> bytes:
    """Send a request, and read the body of its response."""
    async with asyncio.timeout(30):
        return await read_whole(await endpoint.send(request or make_request()))


async def call(
    endpoint: UpstreamEndpoint,
    body: Body = None,
    headers: dict[str, str] | None = None,
    target: str = "/x",
) -> Reply:
    """Send a request and read its response."""
    return await read_reply(await endpoint.send(make_request(body, headers, target)))
