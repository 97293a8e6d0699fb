"""Header lengths in the Content-Type, as clouds have them, ↔ the header of the protocol."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import bad_request
from gateway.protocol.cloud_types import (
    HEADER_SIZE_PARAMETER,
    Cloud,
    format_cloud_type,
    is_cloud_type,
    parse_cloud_type,
)
from gateway.protocol.request_header import HEADER_LENGTH, header_length
from gateway.proxy.interfaces import ClientRequest, ClientResponse


def may_have_cloud_type(headers: CIMultiDictProxy[str]) -> bool:
    """Tell whether the Content-Type may state a header length."""
    return any(map(is_cloud_type, headers.getall("Content-Type", ())))


def translate_cloud_type(request: ClientRequest, response: ClientResponse) -> ClientResponse:
    """Move a request's header length from its Content-Type to the header; return the response.

    The response has its header length in the Content-Type if the cloud expects that. Raises
    GatewayError (400) for a length that is invalid, larger than the body, or not the one of
    Inference-Header-Content-Length.
    """
    headers = request.headers
    # Two types cannot be parsed, so that they are no cloud type.
    cloud_type = parse_cloud_type(", ".join(headers.getall("Content-Type", ())))
    if cloud_type is None:
        return response
    size, stated = cloud_type.header_size, header_length(headers)
    if size is None:
        size = stated
    elif stated is not None and size != stated:
        raise bad_request(
            f"{HEADER_LENGTH} is {stated}, but {HEADER_SIZE_PARAMETER} of the Content-Type {size}"
        )
    _check_size(request, size)
    translated = CIMultiDict(headers)
    translated["Content-Type"] = "application/json" if size is None else "application/octet-stream"
    if size is not None:
        translated[HEADER_LENGTH] = str(size)
    request.headers = CIMultiDictProxy(translated)
    cloud = cloud_type.cloud
    return _CloudTypedResponse(response, cloud) if cloud.length_in_response_type else response


def _check_size(request: ClientRequest, size: int | None) -> None:
    length = request.content_length
    if size is not None and length is not None and size > length:
        raise bad_request(
            f"{HEADER_SIZE_PARAMETER} of the Content-Type is {size}, the body has {length} bytes"
        )


class _CloudTypedResponse(ClientResponse):
    """Moves the header length of a response into its Content-Type."""

    def __init__(self, response: ClientResponse, cloud: Cloud) -> None:
        self.record = response.record
        self._response = response
        self._cloud = cloud

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Start the response."""
        self.started = True
        self._set_type(status, headers)
        await self._response.start(status, reason, headers)

    async def write(self, data: bytes | memoryview) -> None:
        """Write a part of the body."""
        await self._response.write(data)

    async def finish(self) -> None:
        """End the response."""
        await self._response.finish()

    async def send(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> None:
        """Send a whole response."""
        self.started = True
        self._set_type(status, headers)
        await self._response.send(status, reason, headers, body)

    def abort(self) -> None:
        """Drop the connection."""
        self._response.abort()

    def _set_type(self, status: int, headers: CIMultiDict[str]) -> None:
        size = headers.get(HEADER_LENGTH, "")
        if status == 200 and size.isascii() and size.isdigit():
            del headers[HEADER_LENGTH]
            headers["Content-Type"] = format_cloud_type(self._cloud, size)
