"""What routes change in the headers of their responses, the same on both paths."""

from __future__ import annotations

from dataclasses import dataclass

from multidict import CIMultiDict

from gateway.observe.call_record import CallRecord
from gateway.upstream.transport import HeaderLines

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
