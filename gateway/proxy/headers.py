"""HTTP headers that pass through, and what routes change in those of their responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.observe.call_record import CallRecord
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


SERVER_TIMING = "Server-Timing"
"""The header that says where a call's time went: W3C Server Timing."""


@dataclass(frozen=True, slots=True)
class ResponseHeaderPolicy:
    """Changes the headers of every response of a call that its route admits, errors included.

    ``apply`` makes the changes that are the same for equal headers. Whoever sends the response adds
    what differs from call to call.
    """

    adds_vary: bool = False
    """Whether the route compresses responses for some clients."""
    adds_server_timing: bool = False
    """Whether responses say where the call's time went: see ``server_timing``."""

    def apply(self, headers: CIMultiDict[str]) -> None:
        """Change the headers of a response."""
        if self.adds_vary:
            _add_vary(headers)

    def apply_to_lines(self, lines: HeaderLines) -> HeaderLines:
        """Return the changed headers of a fully buffered response."""
        headers = CIMultiDict(lines)
        self.apply(headers)
        return tuple(headers.items())


def _add_vary(headers: CIMultiDict[str]) -> None:
    """Say that the response depends on Accept-Encoding; RFC 9110, section 12.5.5."""
    values = [value for value in headers.getall("Vary", ()) if value]
    names = {name.strip().lower() for value in values for name in value.split(",")}
    if names.isdisjoint(("*", "accept-encoding")):
        headers["Vary"] = ", ".join([*values, "Accept-Encoding"])


def server_timing(record: CallRecord, response_seconds: float | None = None) -> str:
    """Return the value of Server-Timing, as far as it is known; empty before a call was queued.

    Durations are in milliseconds. ``response_seconds`` is the time that the conversion of the
    response took.
    """
    if record.prepare_seconds < 0:
        return ""
    metrics = [_metric("queue", record.queue_seconds)]
    if record.server_form:
        metrics.append(_metric("convert-request", record.prepare_seconds))
    if record.first_byte_seconds:
        metrics.append(_metric("server", record.first_byte_seconds))
    if record.server_form and response_seconds is not None:
        metrics.append(_metric("convert-response", response_seconds))
    return ", ".join(metrics)


def _metric(name: str, seconds: float) -> str:
    return f"{name};dur={round(seconds * 1000, 3)}"
