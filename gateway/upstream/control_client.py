"""The client for the gateway's own small requests: health, metadata, lists of models."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass

from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.upstream.content_decoding import decode_response
from gateway.upstream.transport import UpstreamEndpoint, UpstreamRequest


@dataclass(frozen=True, slots=True)
class ControlResponse:
    """A buffered response."""

    status: int
    content_type: str
    body: bytes


async def send_control_request(
    endpoint: UpstreamEndpoint,
    path: str,
    max_bytes: int,
    max_seconds: float | None = None,
    body: bytes | None = None,
) -> ControlResponse:
    """Send a query and buffer the response, whose body may have ``max_bytes``.

    It is a GET, or with a body, which is JSON, a POST.
    Raises GatewayError: 502 or 503 without a response or for a larger one, 504 for one that takes
    more than ``max_seconds``, and 508 if the endpoint leads back to a gateway.
    """
    method = "GET" if body is None else "POST"
    try:
        async with asyncio.timeout(max_seconds):
            return await _send(endpoint, method, path, max_bytes, body)
    except TimeoutError:
        if max_seconds is None:  # an error of our own
            raise
        message = f"{endpoint.url} did not respond to {method} {path} within {max_seconds:g} s"
        raise GatewayError(ErrorKind.SERVER_TIMEOUT, message, server=endpoint.name) from None


async def _send(
    endpoint: UpstreamEndpoint, method: str, path: str, max_bytes: int, body: bytes | None
) -> ControlResponse:
    headers = CIMultiDict(endpoint.own_request_headers)
    if body is not None:
        headers["Content-Type"] = "application/json"
    chunks = None if body is None else (body,)
    request = UpstreamRequest(method, path, headers, chunks, is_idempotent=True, is_control=True)
    try:
        with closing(await endpoint.send(request)) as response:
            decoded = decode_response(response, endpoint.name)
            if response.status == ErrorKind.LOOP.value.status:
                message = f"loop: {endpoint.url} leads back to the gateway"
                raise GatewayError(ErrorKind.LOOP, message, server=endpoint.name)
            content = bytearray()
            while chunk := await decoded.read():
                content += chunk
                if len(content) > max_bytes:
                    message = f"the response of {endpoint.url} to {method} {path} is larger than"
                    raise bad_response(f"{message} {max_bytes} bytes", endpoint.name)
    except asyncio.CancelledError:
        endpoint.after_timeout()  # these requests have short ones, and no lease that tells
        raise
    content_type = response.headers.get("Content-Type", "application/json")
    return ControlResponse(response.status, content_type, bytes(content))
