"""What an exchange asks of a server's endpoint, whatever transport carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from multidict import CIMultiDict, CIMultiDictProxy

HeaderLines = tuple[tuple[str, str], ...]
"""Names and values of headers, in order."""

Body = Sequence[bytes | memoryview] | AsyncIterable[bytes | memoryview] | None
"""Chunks at hand, chunks to come, or no body at all.

An iterable of chunks to come that is no iterator can be read again, from the start.
"""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request to a server.

    ``target`` is the raw request target. A body to come whose length stands in no Content-Length
    header is sent chunked; one at hand gets such a header.
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


@dataclass(frozen=True, slots=True, eq=False)
class RequestTemplate:
    """What many requests share: method, raw target, and the headers that do not differ.

    Compared by identity: what is made of it is remembered.
    """

    method: str
    target: str
    headers: HeaderLines


class UpstreamResponseHead(Protocol):
    """The head of a server's answer; compared by identity."""

    def __hash__(self) -> int:
        """Give a hash of its identity."""

    @property
    def status(self) -> int:
        """Give the status code."""

    @property
    def reason(self) -> str:
        """Give the reason phrase."""

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """Give the headers."""


class ResponseReceiver(Protocol):
    """Who is called when there is something of the answer to a request that was sent at once."""

    def on_complete(self, head: UpstreamResponseHead, body: bytes | memoryview) -> None:
        """Take an answer that came as a whole; heads that read the same are the same object."""

    def on_headers(self, response: UpstreamResponse) -> None:
        """Take an answer of which there is more to come."""

    def on_error(self, error: Exception) -> None:
        """Take it that there will be no answer: a GatewayError (502) that names the endpoint."""


class PendingRequest(ABC):
    """A request under way."""

    @abstractmethod
    def close(self) -> None:
        """Keep the connection, or drop it where the answer was not read to its end."""


class UpstreamEndpoint(ABC):
    """One server of an upstream.

    ``own_request_headers`` are the headers by which the gateway's own requests, which no client
    has made,
    say who asks.
    """

    url: str
    own_request_headers: HeaderLines = ()

    @abstractmethod
    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; return once the answer's headers are there.

        That may be before all of the body was sent. An error raised by the body is passed on and
        drops the connection. Raises GatewayError that names the endpoint: 503 where it cannot be
        reached, 502 where it closes or answers what is not HTTP.
        """

    def try_send_nowait(
        self, start: RequestTemplate, headers: HeaderLines, body: bytes, receiver: ResponseReceiver
    ) -> PendingRequest | None:
        """Send a request that is at hand as a whole, if that takes no waiting; else give None.

        ``headers`` are those in which this request differs from others with the same start. The
        receiver is called later, once. Not every transport can do so.
        """
        return None

    @abstractmethod
    async def close(self) -> None:
        """Close the connections that no exchange uses."""
