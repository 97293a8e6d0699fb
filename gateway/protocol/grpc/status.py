"""Status codes of gRPC and the text that goes with them: PROTOCOL-HTTP2.md, "Responses".

``ErrorTraits.grpc_code`` has the codes of the gateway's own errors.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final, Self
from urllib.parse import quote, unquote

MAX_ENCODED_MESSAGE: Final = 4 * 1024
"""Bytes of ``grpc-message`` that are written; clients limit all trailers to 8 KiB."""

_ELLIPSIS: Final = "..."
_CUT_ESCAPE: Final = re.compile("%.?$")
_UNENCODED: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class GrpcStatus(IntEnum):
    """The codes of ``grpc-status``: grpc's doc/statuscodes.md; ``http`` is the status over HTTP."""

    http: int

    def __new__(cls, code: int, http: int) -> Self:
        """Make a code and the status over HTTP that stands for it."""
        status = int.__new__(cls, code)
        status._value_, status.http = code, http
        return status

    OK = 0, 200
    CANCELLED = 1, 499
    UNKNOWN = 2, 500
    INVALID_ARGUMENT = 3, 400
    DEADLINE_EXCEEDED = 4, 504
    NOT_FOUND = 5, 404
    ALREADY_EXISTS = 6, 409
    PERMISSION_DENIED = 7, 403
    RESOURCE_EXHAUSTED = 8, 429
    FAILED_PRECONDITION = 9, 400
    ABORTED = 10, 409
    OUT_OF_RANGE = 11, 400
    UNIMPLEMENTED = 12, 501
    INTERNAL = 13, 500
    UNAVAILABLE = 14, 503
    DATA_LOSS = 15, 500
    UNAUTHENTICATED = 16, 401


_BY_CODE: Final = {int(status): status for status in GrpcStatus}
_OF_ERRORS: Final = {
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
"""The code for a status over HTTP."""


def http_status(code: int) -> int:
    """Return the HTTP status for a ``grpc-status``; codes that nobody defined are UNKNOWN."""
    return _BY_CODE.get(code, GrpcStatus.UNKNOWN).http


def status_name(code: int) -> str:
    """Return the name of a ``grpc-status``, or the number of one that nobody defined."""
    return _BY_CODE[code].name if code in _BY_CODE else str(code)


def status_of_error(status: int) -> GrpcStatus:
    """Return the code for an error that an inference server sends over HTTP.

    Such a server knows the operation, and says what is wrong.
    """
    return _OF_ERRORS.get(status, GrpcStatus.UNKNOWN)


def encode_message(text: str) -> str:
    """Percent-encode a text for ``grpc-message``: "Status-Message" of PROTOCOL-HTTP2.md.

    It is cut to whole characters and three dots above ``MAX_ENCODED_MESSAGE``.
    """
    encoded = _encode(text[: MAX_ENCODED_MESSAGE + 1])
    if len(encoded) <= MAX_ENCODED_MESSAGE:
        return encoded
    start = _CUT_ESCAPE.sub("", encoded[: MAX_ENCODED_MESSAGE - len(_ELLIPSIS)])
    return _encode(unquote(start, errors="ignore")) + _ELLIPSIS


def _encode(text: str) -> str:
    return quote(text, safe=_UNENCODED, errors="replace")
