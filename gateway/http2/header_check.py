"""Checks header lists: RFC 9113, sections 8.2 and 8.3. A malformed one is a stream error."""

from __future__ import annotations

import re
from typing import Final

from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.header_table import Header
from gateway.sizes import CACHED_LINES, QUOTED_NAME

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_UPPERCASE = re.compile(rb"[A-Z]")
# Section 8.2.1; other control characters are left to whoever reads the value.
_VALUE = re.compile(rb"(?:[^\0\r\n\t ](?:[^\0\r\n]*[^\0\r\n\t ])?)?")

_CONNECTION_SPECIFIC: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
"""Section 8.2.2."""

_REQUEST: Final = (b":method", b":scheme", b":authority", b":path")
_RESPONSE: Final = (b":status",)
_NONE: Final = ()

_MAX_CACHED_FIELD: Final = 256

_known: dict[Header, bool] = {}
"""Regular fields that are valid; a cache, shared as what is valid is the same for all."""


def check_request(fields: tuple[Header, ...], stream_id: int) -> int:
    """Check the headers of a request; return its Content-Length, or -1.

    Raises Http2Error.
    """
    pseudo, length = _check(fields, _REQUEST, stream_id)
    method = pseudo.get(b":method")
    if not method:
        raise _malformed(":method is missing", stream_id)
    if method == b"CONNECT":  # section 8.5
        if b":scheme" in pseudo or b":path" in pseudo or not pseudo.get(b":authority"):
            raise _malformed("CONNECT needs :authority, and no :scheme or :path", stream_id)
        return length
    if not pseudo.get(b":scheme"):
        raise _malformed(":scheme is missing", stream_id)
    path = pseudo.get(b":path")
    if not path:
        raise _malformed(":path is missing", stream_id)
    if not path.startswith(b"/") and (path != b"*" or method != b"OPTIONS"):
        raise _malformed(":path must begin with /", stream_id)
    _check_host(fields, pseudo.get(b":authority"), stream_id)
    return length


def check_response(fields: tuple[Header, ...], stream_id: int) -> tuple[int, int]:
    """Check the headers of a response; return its status, and its Content-Length or -1.

    Raises Http2Error.
    """
    pseudo, length = _check(fields, _RESPONSE, stream_id)
    status = pseudo.get(b":status", b"")
    if len(status) != 3 or not status.isdigit() or status < b"100":
        raise _malformed(":status must be a number of 100 to 999", stream_id)
    return int(status), length


def check_trailers(fields: tuple[Header, ...], stream_id: int) -> None:
    """Check trailers, which have no pseudo-header fields: section 8.1. Raises Http2Error."""
    _check(fields, _NONE, stream_id)


def _check(
    fields: tuple[Header, ...], allowed: tuple[bytes, ...], stream_id: int
) -> tuple[dict[bytes, bytes], int]:
    """Check fields; return the pseudo-header fields, and the Content-Length or -1."""
    pseudo: dict[bytes, bytes] = {}
    length = -1
    only_pseudo = True
    for field in fields:
        name, value = field
        if name.startswith(b":"):
            _check_pseudo(field, allowed, pseudo, only_pseudo, stream_id)
            pseudo[name] = value
            continue
        only_pseudo = False
        if name == b"content-length":
            length = _read_length(value, length, stream_id)
        elif field not in _known:
            _check_field(field, stream_id)
    return pseudo, length


def _check_pseudo(
    field: Header,
    allowed: tuple[bytes, ...],
    pseudo: dict[bytes, bytes],
    only_pseudo: bool,
    stream_id: int,
) -> None:
    """Check a pseudo-header field: section 8.3."""
    name, value = field
    if name not in allowed:
        raise _malformed(f"{_quoted(name)} has no place here", stream_id)
    if not only_pseudo:
        raise _malformed(f"{_quoted(name)} after a regular field", stream_id)
    if name in pseudo:
        raise _malformed(f"more than one {_quoted(name)}", stream_id)
    _check_value(name, value, stream_id)


def _check_field(field: Header, stream_id: int) -> None:
    """Check a regular field, and remember that it is valid."""
    name, value = field
    if not _NAME.fullmatch(name):
        if _UPPERCASE.search(name):
            raise _malformed(f"the name {_quoted(name)} has upper-case letters", stream_id)
        raise _malformed(f"invalid name {_quoted(name)}", stream_id)
    _check_value(name, value, stream_id)
    if name in _CONNECTION_SPECIFIC:
        raise _malformed(f"{_quoted(name)} has no meaning in HTTP/2", stream_id)
    if name == b"te" and value.lower() != b"trailers":
        raise _malformed("'te' may only be trailers", stream_id)
    if len(name) + len(value) <= _MAX_CACHED_FIELD:
        if len(_known) >= CACHED_LINES:
            _known.clear()
        _known[field] = True


def _check_value(name: bytes, value: bytes, stream_id: int) -> None:
    if not _VALUE.fullmatch(value):
        raise _malformed(
            f"the value of {_quoted(name)} has a line break or NUL, or white space around it",
            stream_id,
        )


def _read_length(value: bytes, before: int, stream_id: int) -> int:
    """Return a Content-Length; several must be equal: RFC 9110, section 8.6."""
    if not value.isdigit() or len(value) > 18:
        raise _malformed("invalid content-length", stream_id)
    length = int(value)
    if before not in (-1, length):
        raise _malformed("content-length twice", stream_id)
    return length


def _check_host(fields: tuple[Header, ...], authority: bytes | None, stream_id: int) -> None:
    """Check that only one host is named: section 8.3.1."""
    for name, value in fields:
        if name == b"host":
            if authority is not None and value.lower() != authority.lower():
                raise _malformed(":authority and host differ", stream_id)
            authority = value


def _malformed(reason: str, stream_id: int) -> Http2Error:
    return Http2Error(ErrorCode.PROTOCOL_ERROR, f"malformed headers: {reason}", stream_id)


def _quoted(name: bytes) -> str:
    return repr(name[:QUOTED_NAME].decode("latin-1"))
