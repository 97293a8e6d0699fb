"""What a client's connection asks of who accepts it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.http1.head import RequestHead
from gateway.listener.messages import HttpRequest, HttpResponse
from gateway.proxy.fast_path.call import FastPathCall
from gateway.proxy.filters.forwarded_headers import ForwardedPolicy
from gateway.proxy.interfaces import ClientResponse
from gateway.system.buffers import BufferAccount
from gateway.system.hangups import HangupWatch

if TYPE_CHECKING:
    from gateway.listener.connection import ClientConnection

Continuation = Callable[[ClientResponse], Awaitable[None]]
"""What is left of an exchange."""


@dataclass(frozen=True, slots=True)
class IdleTimeouts:
    """Seconds that a connection may be without a whole request, or keep a response waiting."""

    request_header_timeout: float = 60.0
    """From the first byte of a head to its last."""
    keep_alive: float = 3600.0
    """From an answer to the next request."""
    idle_timeout: float = 300.0
    """In which a client reads some of what is left of an answer."""


class ConnectionHost(ABC):
    """Who accepts connections, and serves what comes on them."""

    draining: bool
    patience: IdleTimeouts
    forwarding: ForwardedPolicy
    buffers: BufferAccount
    hangups: HangupWatch

    @abstractmethod
    def opened(self, connection: ClientConnection) -> None:
        """Note a connection."""

    @abstractmethod
    def lost(self, connection: ClientConnection) -> None:
        """Forget a connection."""

    @abstractmethod
    def start_fast_path(
        self, connection: ClientConnection, head: RequestHead, body: bytes | memoryview
    ) -> FastPathCall | None:
        """Make an exchange of a request at hand; None if it goes the ordinary way.

        It ends with a call of ``answer`` or ``go_on``.
        """

    @abstractmethod
    def begin(
        self,
        connection: ClientConnection,
        request: HttpRequest,
        answer: HttpResponse,
        rest: Continuation | None = None,
    ) -> asyncio.Task[None]:
        """Have a task make an exchange of a request, or the rest of one.

        It ends with a call of ``answered``.
        """

    @abstractmethod
    def over(self, exchange: FastPathCall) -> None:
        """Note that an exchange of the straight way has ended; tasks tell by themselves."""

    @abstractmethod
    def log(
        self, head: RequestHead, status: int, size: int, seconds: float, request_id: str
    ) -> None:
        """Note an answer; ``status`` is 0 where there was none, ``size`` in bytes."""
