"""HTTP headers that pass through."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.protocol.request_header import HEADER_LENGTH
from gateway.upstream.transport import HOP_BY_HOP, HeaderLines

# RFC 9110, section 7.6.1: Connection must not name headers for all recipients. Without these, the
# other end would read another message than the gateway.
_MESSAGE_HEADERS = frozenset(
    ("host", "content-length", "content-type", "content-encoding", HEADER_LENGTH.lower())
)
_BODY_HEADERS = frozenset(("content-length", HEADER_LENGTH.lower()))


def end_to_end(
    headers: CIMultiDictProxy[str], dropped_headers: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    """Copy the end-to-end headers, without ``dropped_headers``, which are in lower case."""
    return CIMultiDict(_without(headers, HOP_BY_HOP | dropped_headers))


def to_server(
    headers: CIMultiDictProxy[str], dropped_headers: frozenset[str], added_headers: HeaderLines = ()
) -> CIMultiDictProxy[str]:
    """Copy the headers that pass to a server, and append those that the gateway adds."""
    passed = end_to_end(headers, dropped_headers)
    passed.extend(added_headers)
    return CIMultiDictProxy(passed)


def with_body(
    headers: CIMultiDictProxy[str], changed: Mapping[str, str | None]
) -> CIMultiDict[str]:
    """Copy the end-to-end headers for a new body.

    Headers of the old body are dropped. ``changed`` replaces headers; None drops one.
    """
    passed = _without(headers, _names_to_drop(tuple(changed)))
    passed += [(name, value) for name, value in changed.items() if value is not None]
    return CIMultiDict(passed)


@lru_cache
def _names_to_drop(changed: tuple[str, ...]) -> frozenset[str]:
    return HOP_BY_HOP | _BODY_HEADERS | {name.lower() for name in changed}


def _without(headers: CIMultiDictProxy[str], dropped: frozenset[str]) -> list[tuple[str, str]]:
    dropped |= connection_options(headers)
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]


def connection_options(headers: CIMultiDictProxy[str] | CIMultiDict[str]) -> frozenset[str]:
    """Return the names, in lower case, of headers that Connection keeps from being passed on."""
    if "Connection" not in headers:
        return frozenset()
    named = ",".join(headers.getall("Connection")).lower().split(",")
    return frozenset(name.strip() for name in named) - _MESSAGE_HEADERS
