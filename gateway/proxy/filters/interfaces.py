"""What a filter of bodies is, and what helps to write one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.protocol.operations import Operation
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.interfaces import Call, ClientResponse, HeaderLines


@dataclass(frozen=True, slots=True)
class FilteredHead:
    """The head of a request, and what its route says of filters.

    ``operation`` is the one for the server. Responses may be compressed with ``codings``.
    """

    method: str
    headers: CIMultiDictProxy[str]
    operation: Operation
    codings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BodyFilter:
    """Reads or changes the bodies of the calls that it applies to: they are streamed.

    ``applies`` looks at no headers but ``header_names``, which are in lower case.
    """

    header_names: frozenset[str]
    applies: Callable[[FilteredHead], bool]
    wrap_response: (
        Callable[[ClientResponse, FilteredHead, ConversionScheduler], ClientResponse] | None
    ) = None
    """Returns the response to use instead, for errors too."""
    change_call: Callable[[Call, Reservation], Awaitable[Call]] | None = None
    """Returns the call to serve instead, once it is admitted.

    The reservation is for what the filter buffers. Raises GatewayError for an invalid request.
    """


class WrappedResponse(ClientResponse):
    """Passes on what is written to another response; a filter overrides what it changes."""

    def __init__(self, response: ClientResponse) -> None:
        self.record = response.record
        self._response = response

    def change_head(self, status: int, headers: CIMultiDict[str], size: int | None) -> None:
        """Change the headers; ``size`` is that of the body in bytes, if known."""

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Start the response."""
        length = headers.get("Content-Length", "")
        self.change_head(status, headers, int(length) if length.isdecimal() else None)
        self.started = True
        await self._response.start(status, reason, headers)

    async def write(self, data: bytes | memoryview) -> None:
        """Write a part of the body."""
        await self._response.write(data)

    async def finish(self, trailers: HeaderLines = ()) -> None:
        """End the response."""
        await self._response.finish(trailers)

    async def send(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> None:
        """Send a whole response."""
        self.change_head(status, headers, len(body))
        body = await self.change_body(body)
        self.started = True
        await self._response.send(status, reason, headers, body)

    async def change_body(self, body: bytes) -> bytes:
        """Return the body of a whole response, when its headers are changed."""
        return body

    def abort(self) -> None:
        """Drop the connection."""
        self._response.abort()
