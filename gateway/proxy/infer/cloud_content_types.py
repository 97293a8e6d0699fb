"""Requests in a cloud's form, brought into the ordinary one, and their answers back."""

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
from gateway.proxy.headers import HEADER_LENGTH, header_length
from gateway.proxy.interfaces import ClientRequest, ClientResponse


def is_cloud_form(headers: CIMultiDictProxy[str]) -> bool:
    """Tell whether the content type may be one that tells the header length."""
    return any(map(is_cloud_type, headers.getall("Content-Type", ())))


def in_ordinary_form(request: ClientRequest, answer: ClientResponse) -> ClientResponse:
    """Have a request say its header length as servers know it; give who takes the answer.

    Raises GatewayError (400) for a length that is none, is larger than the body, or is not the one
    that Inference-Header-Content-Length says.
    """
    headers = request.headers
    # Two types are none that can be read.
    found = parse_cloud_type(", ".join(headers.getall("Content-Type", ())))
    if found is None:
        return answer
    size, said = found.header_size, header_length(headers)
    if size is None:
        size = said
    elif said is not None and size != said:
        raise bad_request(
            f"{HEADER_LENGTH} is {said}, but {HEADER_SIZE_PARAMETER} of the Content-Type {size}"
        )
    _check_size(request, size)
    ordinary = CIMultiDict(headers)
    ordinary["Content-Type"] = "application/json" if size is None else "application/octet-stream"
    if size is not None:
        ordinary[HEADER_LENGTH] = str(size)
    request.headers = CIMultiDictProxy(ordinary)
    return _TypedAnswer(answer, found.cloud) if found.cloud.length_in_response_type else answer


def _check_size(request: ClientRequest, size: int | None) -> None:
    length = request.content_length
    if size is not None and length is not None and size > length:
        raise bad_request(
            f"{HEADER_SIZE_PARAMETER} of the Content-Type is {size}, the body has {length} bytes"
        )


class _TypedAnswer(ClientResponse):
    """Passes an answer on, with its header length in its type, where it has one."""

    def __init__(self, answer: ClientResponse, cloud: Cloud) -> None:
        self.request_id = answer.request_id
        self._answer = answer
        self._cloud = cloud

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Begin the answer."""
        self.started = True
        self._retype(status, headers)
        await self._answer.start(status, reason, headers)

    async def write(self, data: bytes | memoryview) -> None:
        """Write a part of the body."""
        await self._answer.write(data)

    async def finish(self) -> None:
        """End the answer."""
        await self._answer.finish()

    async def send(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> None:
        """Give a whole answer."""
        self.started = True
        self._retype(status, headers)
        await self._answer.send(status, reason, headers, body)

    def abort(self) -> None:
        """Drop the connection."""
        self._answer.abort()

    def _retype(self, status: int, headers: CIMultiDict[str]) -> None:
        size = headers.get(HEADER_LENGTH, "")
        if status == 200 and size.isascii() and size.isdigit():
            del headers[HEADER_LENGTH]
            headers["Content-Type"] = format_cloud_type(self._cloud, size)
