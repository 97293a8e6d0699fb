"""What the connections of clients and their listener know of each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.errors import RETRY_AFTER, ErrorKind, GatewayError
from gateway.system.buffers import NO_ROOM, Body

CLIENT_CLOSED: Final = "the client closed the connection"


def stalled_body_error() -> GatewayError:
    """Return the error of a request whose body makes room for others."""
    message = "the body of the request stalled, or came slowly, and "
    return GatewayError(ErrorKind.CLIENT_TIMEOUT, message + NO_ROOM, RETRY_AFTER)


def unread_response_error() -> GatewayError:
    """Return the error of a response that makes room for others as its client does not read it."""
    message = "the client did not read its response, or read it slowly, while others needed the "
    return GatewayError(ErrorKind.OVERLOADED, message + "room (limits.max_buffered_bytes)")


@dataclass(frozen=True, slots=True)
class IdleTimeouts:
    """Seconds after which an idle connection is closed, or a request that goes on is dropped."""

    request_header_timeout: float = 60.0
    """From the first byte of a request's head to its last."""
    keep_alive_timeout: float = 3600.0
    """From a response to the next request."""
    idle_timeout: float = 300.0
    """In which a client must read some of the rest of a response."""
    linger_timeout: float = 10.0
    """In which a client must end what it still sends after a complete response."""


class UnreadCheck:
    """Tells for how long a client has read nothing.

    A closing connection stays open until all is sent, which may be forever.
    """

    def __init__(self) -> None:
        self._unsent = 0
        self._since = 0.0

    def reset(self) -> None:
        """Start anew at the next check."""
        self._unsent = 0

    def seconds(self, unsent: int, now: float) -> float:
        """Return for how many seconds the number of ``unsent`` bytes has not changed."""
        if not unsent or unsent != self._unsent:
            self._unsent, self._since = unsent, now
        return now - self._since


def seconds_stalled(body: Body, now: float) -> float:
    """Return how slow a body is, or a response that is read; 0 if its client is not waited for."""
    progress = body.progress
    return progress.slowness(now) if progress.is_waited_for and body.is_reading() else 0.0


class ListenerConnection(Protocol):
    """A connection of a client, as its listener sees it."""

    transport: asyncio.Transport

    @property
    def is_idle(self) -> bool:
        """Whether it has no call."""

    def seconds_stalled(self, now: float) -> float:
        """Return for how many seconds all its calls have waited for the client, 0 if one has not.

        ``now`` is of ``time.monotonic``. A call whose request is complete waits for its server.
        """

    def drop(self, why: str) -> None:
        """Reset the connection; ``why`` is the error of its calls."""

    def close_if_idle(self) -> None:
        """Close the connection if its client has done nothing for too long."""

    def announce_drain(self) -> None:
        """Tell the client that the gateway drains, if the protocol has a way."""

    def close_for_drain(self, grace: float) -> None:
        """Close the connection if it was idle for ``grace`` seconds; see ``drain``."""
