"""The one table of what can go wrong: error kind → HTTP status, gRPC code, may it be retried."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

_E = TypeVar("_E", bound=BaseException)


@dataclass(frozen=True, slots=True)
class ErrorTraits:
    """How a kind of error is answered."""

    status: int
    grpc_code: int
    retryable: bool = False
    """The server cannot have seen a whole request, so that another endpoint may be tried."""
    upstream_failed: bool = False
    """It is the server that failed."""
    no_response: bool = False
    """The server closed without a byte of an answer: what was asked may have been done."""


class ErrorKind(Enum):
    """What went wrong, in the terms of both protocols (gRPC codes as in google.rpc.Code)."""

    BAD_REQUEST = ErrorTraits(400, 3)
    UNAUTHENTICATED = ErrorTraits(401, 16)
    FORBIDDEN = ErrorTraits(403, 7)
    NOT_FOUND = ErrorTraits(404, 5)
    NOT_ALLOWED = ErrorTraits(405, 12)
    NOT_ACCEPTABLE = ErrorTraits(406, 9)
    CLIENT_TIMEOUT = ErrorTraits(408, 4)
    TOO_LARGE = ErrorTraits(413, 8)
    UNSUPPORTED_ENCODING = ErrorTraits(415, 12)
    INTERNAL = ErrorTraits(500, 13)
    UNSUPPORTED = ErrorTraits(501, 12)
    BAD_RESPONSE = ErrorTraits(502, 14, upstream_failed=True)
    NO_RESPONSE = ErrorTraits(502, 14, upstream_failed=True, no_response=True)
    OVERLOADED = ErrorTraits(503, 8)
    EXHAUSTED = ErrorTraits(503, 8, retryable=True)
    NOT_READY = ErrorTraits(503, 14)
    UNREACHABLE = ErrorTraits(503, 14, retryable=True, upstream_failed=True)
    SERVER_TIMEOUT = ErrorTraits(504, 4, upstream_failed=True)
    LOOP = ErrorTraits(508, 9)


RETRY_AFTER = 1
"""Seconds after which a client may try again that met with a lack of the gateway's own."""


class GatewayError(Exception):
    """An error that the client is told of, as ``{"error": message}``.

    ``retry_after`` is in seconds, where it makes sense to try again then.
    """

    def __init__(self, kind: ErrorKind, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after = retry_after


def strip_tracebacks(error: _E) -> _E:
    """Detach an exception, and those behind it, from the frames that it passed through.

    For whoever catches an exception and does not raise it on, or stores it. A traceback holds all
    those frames, and a frame its local variables: a body, and often what leads back to the
    exception. Such a cycle keeps the body until the cyclic collector happens to run.
    """
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is not None:
            chain += (each.__cause__, each.__context__)
            each.__traceback__ = each.__cause__ = each.__context__ = None
    return error


def shorten(text: str, most: int) -> str:
    """Cut a text that an error or a log line quotes to so many characters and three dots."""
    return text if len(text) <= most else text[:most] + "..."


def escape_for_log(message: str) -> str:
    """Escape line breaks and control characters of a message, for a line of the log.

    Messages quote servers, and what a server says must not pass for a line of its own.
    """
    if message.isprintable():
        return message
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)


def bad_request(message: str) -> GatewayError:
    """Make the error of a request that breaks the protocol; the message names the culprit."""
    return GatewayError(ErrorKind.BAD_REQUEST, message)


def bad_response(message: str) -> GatewayError:
    """Make the error of a server's answer that breaks the protocol or was cut short."""
    return GatewayError(ErrorKind.BAD_RESPONSE, message)
