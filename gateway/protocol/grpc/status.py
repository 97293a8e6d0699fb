"""Status codes of gRPC and the text that goes with them: PROTOCOL-HTTP2.md, "Responses".

``ErrorTraits.grpc_code`` has the codes of the gateway's own errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final
from urllib.parse import quote, unquote

MAX_ENCODED_MESSAGE: Final = 4 * 1024
"""Bytes of ``grpc-message`` that are written; clients limit all trailers to 8 KiB."""

_ELLIPSIS: Final = "..."
_UNENCODED: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class GrpcStatus(IntEnum):
    """The codes of ``grpc-status``: grpc's doc/statuscodes.md."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_CODES: Final = frozenset(map(int, GrpcStatus))

_TO_HTTP: Final[Mapping[int, int]] = MappingProxyType(
    {
        GrpcStatus.OK: 200,
        GrpcStatus.CANCELLED: 499,
        GrpcStatus.UNKNOWN: 500,
        GrpcStatus.INVALID_ARGUMENT: 400,
        GrpcStatus.DEADLINE_EXCEEDED: 504,
        GrpcStatus.NOT_FOUND: 404,
        GrpcStatus.ALREADY_EXISTS: 409,
        GrpcStatus.PERMISSION_DENIED: 403,
        GrpcStatus.RESOURCE_EXHAUSTED: 429,
        GrpcStatus.FAILED_PRECONDITION: 400,
        GrpcStatus.ABORTED: 409,
        GrpcStatus.OUT_OF_RANGE: 400,
        GrpcStatus.UNIMPLEMENTED: 501,
        GrpcStatus.INTERNAL: 500,
        GrpcStatus.UNAVAILABLE: 503,
        GrpcStatus.DATA_LOSS: 500,
        GrpcStatus.UNAUTHENTICATED: 401,
    }
)
_FROM_HTTP: Final[Mapping[int, GrpcStatus]] = MappingProxyType(
    {
        400: GrpcStatus.INTERNAL,
        401: GrpcStatus.UNAUTHENTICATED,
        403: GrpcStatus.PERMISSION_DENIED,
        404: GrpcStatus.UNIMPLEMENTED,
        429: GrpcStatus.UNAVAILABLE,
        431: GrpcStatus.INTERNAL,
        502: GrpcStatus.UNAVAILABLE,
        503: GrpcStatus.UNAVAILABLE,
        504: GrpcStatus.UNAVAILABLE,
    }
)

_OF_ERRORS: Final[Mapping[int, GrpcStatus]] = MappingProxyType(
    {
        400: GrpcStatus.INVALID_ARGUMENT,
        401: GrpcStatus.UNAUTHENTICATED,
        403: GrpcStatus.PERMISSION_DENIED,
        404: GrpcStatus.NOT_FOUND,
        405: GrpcStatus.UNIMPLEMENTED,
        409: GrpcStatus.ABORTED,
        413: GrpcStatus.RESOURCE_EXHAUSTED,
        415: GrpcStatus.UNIMPLEMENTED,
        429: GrpcStatus.RESOURCE_EXHAUSTED,
        499: GrpcStatus.CANCELLED,
        500: GrpcStatus.INTERNAL,
        501: GrpcStatus.UNIMPLEMENTED,
        502: GrpcStatus.UNAVAILABLE,
        503: GrpcStatus.UNAVAILABLE,
        504: GrpcStatus.DEADLINE_EXCEEDED,
    }
)


def http_status(code: int) -> int:
    """Return the HTTP status for a ``grpc-status``; codes that nobody defined are UNKNOWN."""
    return _TO_HTTP.get(code, _TO_HTTP[GrpcStatus.UNKNOWN])


def status_name(code: int) -> str:
    """Return the name of a ``grpc-status``, or the number of one that nobody defined."""
    return GrpcStatus(code).name if code in _CODES else str(code)


def status_of_http(status: int) -> GrpcStatus:
    """Return the code of a response to a gRPC call that lacks ``grpc-status``.

    An intermediary made it, or a server that speaks no gRPC: doc/http-grpc-status-mapping.md of
    grpc. The table is for nothing else, so an unknown path (404) is UNIMPLEMENTED.
    """
    return _FROM_HTTP.get(status, GrpcStatus.UNKNOWN)


def status_of_error(status: int) -> GrpcStatus:
    """Return the code for an error that an inference server sends over HTTP.

    Unlike ``status_of_http`` it is for servers that know the operation, and say what is wrong.
    """
    return _OF_ERRORS.get(status, GrpcStatus.UNKNOWN)


def encode_message(text: str) -> str:
    """Percent-encode a text for ``grpc-message``: "Status-Message" of PROTOCOL-HTTP2.md.

    It is cut to whole characters and three dots above ``MAX_ENCODED_MESSAGE``.
    """
    encoded = _encode(text[: MAX_ENCODED_MESSAGE + 1])
    if len(encoded) <= MAX_ENCODED_MESSAGE:
        return encoded
    remaining = MAX_ENCODED_MESSAGE - len(_ELLIPSIS)
    kept: list[str] = []
    for character in text:
        code = _encode(character)
        remaining -= len(code)
        if remaining < 0:
            break
        kept.append(code)
    return "".join(kept) + _ELLIPSIS


def decode_message(value: str) -> str:
    """Decode ``grpc-message``; invalid parts must not lose the rest, so they stay as they are.

    Bytes that are not UTF-8 become U+FFFD.
    """
    return unquote(value)


def _encode(text: str) -> str:
    return quote(text, safe=_UNENCODED, errors="replace")
