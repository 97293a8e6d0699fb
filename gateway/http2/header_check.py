"""Checks header lists: RFC 9113, sections 8.2 and 8.3. A malformed one is a stream error."""

from __future__ import annotations

import re
from typing import Final, cast

from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.hpack import NOT_INDEXED, Header
from gateway.sizes import CACHED_LINES, QUOTED_NAME
from gateway.system.bounded_cache import BoundedCache

_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_UPPERCASE: Final = re.compile(rb"[A-Z]")
# Section 8.2.1, and RFC 9110, section 5.5: control characters have no place in any field.
_CONTROLS_AS_SPACE: Final = bytes.maketrans(bytes([*range(9), *range(10, 32), 127]), b" " * 32)
# What becomes of these in HTTP/1.1 must not be another request: section 10.3.
_METHOD: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SCHEME: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*")
_PATH: Final = re.compile(rb"/[!-~]*|\*")
_STATUS: Final = re.compile(rb"[1-9][0-9]{2}")
# RFC 3986, section 3.2: a host and a port; section 8.3.1 forbids user names.
_AUTHORITY: Final = re.compile(rb"(?:\[[0-9A-Za-z:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")

CONNECTION_SPECIFIC: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
"""Section 8.2.2."""

_REQUEST: Final = {
    b":method": _METHOD,
    b":scheme": _SCHEME,
    b":authority": _AUTHORITY,
    b":path": _PATH,
}
_RESPONSE: Final = {b":status": _STATUS}
_NONE: Final[dict[bytes, re.Pattern[bytes]]] = {}

_COLON: Final = ord(":")
_MAX_SPACE: Final = ord(" ")
_SPACE: Final = b" \t"
"""Section 8.2.1: white space around a value is malformed. But users send it in ``Bearer $TOKEN``
with an empty variable, and over HTTP/1.1 it is no part of the value. So that of requests is ignored
here, and must be stripped by whoever uses the value."""

_MAX_CACHED_FIELD: Final = 256

_known: BoundedCache[object, bool] = BoundedCache(CACHED_LINES)
"""Fields with valid names and values; a cache, shared as what is valid is the same for all."""


def check_request(fields: tuple[Header, ...], stream_id: int) -> int:
    """Check the headers of a request; return its Content-Length, or -1.

    White space around the values of regular fields passes. Raises Http2Error.
    """
    found, length = _check(fields, _REQUEST, stream_id, _SPACE)
    method = found.get(b":method")
    if method is None:
        raise _malformed(":method is missing", stream_id)
    authority = found.get(b":authority")
    host = found.get(b"host")
    # Section 8.3.1: only one host is named.
    if host is not None and authority is not None and host.lower() != authority.lower():
        raise _malformed(":authority and host differ", stream_id)
    if method == b"CONNECT":  # section 8.5
        if b":scheme" in found or b":path" in found or not authority:
            raise _malformed("CONNECT needs :authority, and no :scheme or :path", stream_id)
        return -1  # what follows is no body
    if b":scheme" not in found:
        raise _malformed(":scheme is missing", stream_id)
    path = found.get(b":path")
    if path is None:
        raise _malformed(":path is missing", stream_id)
    if path == b"*" and method != b"OPTIONS":
        raise _malformed(":path must begin with /", stream_id)
    return length


def check_response(fields: tuple[Header, ...], stream_id: int) -> tuple[int, int]:
    """Check the headers of a response; return its status, and its Content-Length or -1.

    Raises Http2Error.
    """
    found, length = _check(fields, _RESPONSE, stream_id)
    status = found.get(b":status")
    if status is None:
        raise _malformed(":status is missing", stream_id)
    if status == b"101":  # section 8.6
        raise _malformed(":status 101 has no meaning in HTTP/2", stream_id)
    return int(status), length


def check_trailers(fields: tuple[Header, ...], stream_id: int, *, is_request: bool = False) -> None:
    """Check trailers, which have no pseudo-header fields: section 8.1. Raises Http2Error."""
    _check(fields, _NONE, stream_id, _SPACE if is_request else b"")


def _check(
    fields: tuple[object, ...],
    allowed: dict[bytes, re.Pattern[bytes]],
    stream_id: int,
    space: bytes = b"",
) -> tuple[dict[bytes, bytes], int]:
    """Check fields; return the pseudo-header fields and the host, and the Content-Length or -1.

    Around the values of regular fields, ``space`` passes.
    """
    found: dict[bytes, bytes] = {}
    length = -1
    only_pseudo = True
    known = _known.recent
    for field in fields:
        name, value = cast("Header", field)
        if name and name[0] == _COLON:
            if not only_pseudo:
                raise _malformed(f"{_quoted(name)} after a regular field", stream_id)
            if name in found:
                raise _malformed(f"more than one {_quoted(name)}", stream_id)
            if name not in allowed:
                raise _malformed(f"{_quoted(name)} has no place here", stream_id)
            if field not in known:
                _check_pseudo((name, value), allowed[name], stream_id)
            found[name] = value
            continue
        only_pseudo = False
        if name == b"content-length":
            length = _read_length(_trim(value, space), length, stream_id)
        elif field not in known:
            _check_field((name, _trim(value, space)), stream_id)
        if name == b"host" and found.setdefault(name, host := _trim(value, space)) != host:
            raise _malformed("more than one host", stream_id)
    return found, length


def _trim(value: bytes, space: bytes) -> bytes:
    return value.strip(space) if space else value


def _check_pseudo(field: Header, pattern: re.Pattern[bytes], stream_id: int) -> None:
    """Check a pseudo-header field, and remember that it is valid: section 8.3."""
    name, value = field
    if _known.get(field) is not None:
        return
    if not pattern.fullmatch(value):
        raise _malformed(f"invalid {_quoted(name)}", stream_id)
    _remember(field)


def _check_field(field: Header, stream_id: int) -> None:
    """Check a regular field, and remember that it is valid."""
    name, value = field
    if name in NOT_INDEXED:  # a valid name, with another value each time
        if name == b"grpc-message":
            # Triton's texts may end with a space, which gRPC does not encode.
            value = value.strip(b" ")
        _check_value(name, value, stream_id)
        return
    if _known.get(field) is not None:
        return
    if not _NAME.fullmatch(name):
        if _UPPERCASE.search(name):
            raise _malformed(f"the name {_quoted(name)} has upper-case letters", stream_id)
        raise _malformed(f"invalid name {_quoted(name)}", stream_id)
    _check_value(name, value, stream_id)
    if name in CONNECTION_SPECIFIC:
        raise _malformed(f"{_quoted(name)} has no meaning in HTTP/2", stream_id)
    if name == b"te" and value.lower() != b"trailers":
        raise _malformed("'te' may only be trailers", stream_id)
    if name == b"host" and not _AUTHORITY.fullmatch(value):
        raise _malformed("invalid host", stream_id)
    _remember(field)


def _check_value(name: bytes, value: bytes, stream_id: int) -> None:
    # A valid value stays the same object. A regular expression takes five times as long for the
    # traceparent of each request.
    is_valid = value.translate(_CONTROLS_AS_SPACE) == value
    if not is_valid or (value and (value[0] <= _MAX_SPACE or value[-1] <= _MAX_SPACE)):
        raise _malformed(
            f"the value of {_quoted(name)} has control characters, or white space around it",
            stream_id,
        )


def _remember(field: Header) -> None:
    if len(field[0]) + len(field[1]) <= _MAX_CACHED_FIELD:
        _known.put(field, True)


def _read_length(value: bytes, before: int, stream_id: int) -> int:
    """Return a Content-Length; several must be equal: RFC 9110, section 8.6."""
    if not value.isdigit() or len(value) > 18:
        raise _malformed("invalid content-length", stream_id)
    length = int(value)
    if before not in (-1, length):
        raise _malformed("content-length twice", stream_id)
    return length


def _malformed(reason: str, stream_id: int) -> Http2Error:
    return Http2Error(ErrorCode.PROTOCOL_ERROR, f"malformed headers: {reason}", stream_id)


def _quoted(name: bytes) -> str:
    return repr(name[:QUOTED_NAME].decode("latin-1"))
