"""What a filter of bodies says of itself: which calls it applies to, and what it changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from multidict import CIMultiDictProxy

from gateway.protocol.operations import Operation
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.interfaces import Call, ClientResponse


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
