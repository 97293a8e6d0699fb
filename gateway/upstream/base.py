"""What an exchange asks of a server's endpoint, whatever transport carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass

from multidict import CIMultiDict, CIMultiDictProxy

Body = Sequence[bytes | memoryview] | AsyncIterable[bytes | memoryview] | None
"""Chunks at hand, chunks to come, or no body at all."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request to a server.

    ``target`` is the raw request target. A body to come whose length stands in no Content-Length
    header is sent chunked; one at hand has such a header.
    """

    method: str
    target: str
    headers: CIMultiDict[str]
    body: Body = None


class UpstreamResponse(ABC):
    """A server's answer, of which the body is still to come."""

    status: int
    reason: str
    headers: CIMultiDictProxy[str]

    @property
    def content_length(self) -> int | None:
        """Give the bytes of the body, None where the server did not say."""
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isascii() and length.isdigit() else None

    @abstractmethod
    async def read(self) -> bytes | memoryview:
        """Give what came next of the body, none at its end.

        Raises GatewayError (502) that names the endpoint where the body is cut short.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the connection back, or drop it where the body was not read to its end."""


class UpstreamEndpoint(ABC):
    """One server of an upstream."""

    url: str

    @abstractmethod
    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; return once the answer's headers are there.

        That may be before all of the body was sent. An error raised by the body is passed on and
        drops the connection. Raises GatewayError that names the endpoint: 503 where it cannot be
        reached, 502 where it closes or answers what is not HTTP.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the connections that no exchange uses."""
