"""Requests to endpoints that speak HTTP/2, and their responses read whole."""

from __future__ import annotations

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
    body: Body = None, headers: dict[str, str] | None = None, target: str = "/x"
) -> UpstreamRequest:
    """Make a request by POST."""
    return UpstreamRequest("POST", target, CIMultiDict(headers or {}), body)


async def read_reply(response: UpstreamResponse) -> Reply:
    """Read a response to its end, and close it."""
    try:
        body = bytearray()
        while piece := await response.read():
            body += piece
        assert response.received_bytes == len(body)
        return Reply(response.status, dict(response.headers), bytes(body), response.trailers)
    finally:
        response.close()


async def call(
    endpoint: UpstreamEndpoint,
    body: Body = None,
    headers: dict[str, str] | None = None,
    target: str = "/x",
) -> Reply:
    """Send a request and read its response."""
    return await read_reply(await endpoint.send(make_request(body, headers, target)))
