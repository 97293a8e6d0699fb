"""Writes where a call's time went: the Server-Timing header, W3C Server Timing."""

from __future__ import annotations

from gateway.observe.call_record import CallRecord

SERVER_TIMING = "Server-Timing"


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
