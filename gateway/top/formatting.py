"""Write numbers, times and codes in words and units. What is not known is a dash."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime

from gateway.protocol.grpc.status import GrpcStatus

UNKNOWN = "–"

_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")


def number(value: float | None) -> str:
    """Return a number with about three digits; large ones with k, M, G."""
    if value is None:
        return UNKNOWN
    if abs(value) < 99_950:
        return _digits(value)
    power = 0
    while abs(value) >= 999.5 and power < len(_THOUSANDS) - 1:
        value /= 1000
        power += 1
    return f"{_digits(value)} {_THOUSANDS[power]}"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}".removesuffix(".0")
    if size >= 0.9995:
        return f"{value:.2f}".rstrip("0").removesuffix(".")
    if size >= 0.0005:
        return f"{value:.3f}".rstrip("0")
    return "<0.001" if value else "0"


def count(value: float | None) -> str:
    """Return a whole number."""
    return UNKNOWN if value is None else f"{value:,.0f}" if abs(value) < 1e9 else number(value)


def plural(value: float | None, one: str, many: str = "") -> str:
    """Return a number of things."""
    return f"{count(value)} {one if value == 1 else many or f'{one}s'}"


def rate(value: float | None) -> str:
    """Return a rate per second."""
    return UNKNOWN if value is None else f"{number(value)}/s"


def percent(ratio: float | None) -> str:
    """Return a ratio in percent."""
    if ratio is None:
        return UNKNOWN
    value = 100 * ratio
    if 0 < value < 0.01:
        return "<0.01 %"
    if 99.99 < value < 100:
        return ">99.99 %"
    return f"{f'{value:.2f}'.rstrip('0').removesuffix('.') if value < 1 else number(value)} %"


def milliseconds(value: float | None) -> str:
    """Return a duration that is given in milliseconds."""
    if value is None:
        return UNKNOWN
    return f"{number(value)} ms" if value < 999.5 else seconds(value / 1000)


def seconds(value: float | None) -> str:
    """Return a duration, with its two largest units."""
    if value is None:
        return UNKNOWN
    if value < 1:
        return f"{number(1000 * value)} ms" if value > 0 else "0 s"
    if value < 59.95:
        return f"{number(value)} s"
    whole = round(value)
    amounts = (whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min")
    parts = [*amounts, (whole % 60, "s")]
    first = next(position for position, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)


def whole_seconds(value: float | None) -> str:
    """Return a duration in whole seconds and above, which do not flicker."""
    return UNKNOWN if value is None else seconds(max(0, round(value)))


def last_seconds(value: float | None) -> str:
    """Say of how many seconds percentiles are: a young gateway has less than a minute."""
    return f"last {value:.0f} s" if value is not None and value < 60 else "last minute"


def size(value: float | None) -> str:
    """Return a number of bytes."""
    if value is None:
        return UNKNOWN
    power = 0
    while abs(value) >= 999.5 and power < len(_THOUSANDS) - 1:
        value /= 1000
        power += 1
    return f"{value:.0f} B" if power == 0 else f"{_digits(value)} {_THOUSANDS[power]}B"


def size_rate(value: float | None) -> str:
    """Return bytes per second."""
    return UNKNOWN if value is None else f"{size(value)}/s"


def unix_time(iso: str) -> float | None:
    """Return a time of ISO 8601 as seconds since 1970; None if it is not one."""
    try:
        return datetime.fromisoformat(iso).timestamp()
    except (ValueError, OverflowError):
        return None


def clock(at: float | None, now: float, *, exact: bool = False) -> str:
    """Return the local time of day; with the date if that was another day."""
    if at is None:
        return UNKNOWN
    try:
        local = time.localtime(at)
        day = time.strftime("%Y-%m-%d ", local)
        text = time.strftime("%H:%M:%S", local)
        today = time.strftime("%Y-%m-%d ", time.localtime(now))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN
    if exact:
        text += f".{int(at % 1 * 1000):03}"
    return text if day == today else day + text


def short_clock(at: float | None, now: float) -> str:
    """Return the local time of day, or only the date if that was another day: 8 characters."""
    text = clock(at, now)
    return text if len(text) <= 8 else text[2:10]


_HTTP = {
    200: "OK",
    201: "Created",
    202: "Accepted",
    204: "No content",
    304: "Not modified",
    400: "Bad request",
    401: "Not authenticated",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    406: "Not acceptable",
    408: "Client too slow",
    409: "Conflict",
    411: "Length required",
    412: "Precondition failed",
    413: "Too large",
    414: "URL too long",
    415: "Unsupported media type",
    417: "Expectation failed",
    421: "Wrong host",
    422: "Not processable",
    429: "Too many requests",
    431: "Header too large",
    499: "Client left",
    500: "Server error",
    501: "Not implemented",
    502: "Bad gateway",
    503: "Unavailable",
    504: "Timeout",
    507: "No memory",
    508: "Loop",
}
_GRPC = {int(each): each.name.replace("_", " ").lower() for each in GrpcStatus} | {0: "OK"}
_FORMS = {"json": "JSON", "raw": "raw bytes", "v1": "V1 JSON", "grpc": "gRPC", "": "as sent"}
_PROTOCOLS = {"http": "HTTP", "grpc": "gRPC"}


def call_status(status: int, grpc_status: int | None) -> str:
    """Return how a call ended: ``503 Unavailable``, ``gRPC 14 unavailable``."""
    http = f"{status} {_HTTP.get(status, '')}".rstrip() if status else "aborted"
    if grpc_status is None:
        return http
    word = _GRPC.get(grpc_status, "")
    grpc = f"gRPC {grpc_status} {word}".rstrip()
    return grpc if status == 200 else f"{http}, {grpc}"


def form(name: str) -> str:
    """Return the name of a form of infer requests."""
    return _FORMS.get(name, name)


def forms(client: str, server: str) -> str:
    """Return the form of a client, and that of the server if it differs."""
    if not client and not server:
        return UNKNOWN
    return form(client) if server in ("", client) else f"{form(client)} → {form(server)}"


def protocol(name: str) -> str:
    """Return the name of a protocol."""
    return _PROTOCOLS.get(name, name)


def rates(by_name: Mapping[str, float], *, are_forms: bool = False) -> str:
    """Return rates by name: ``2xx 10.1/s, 4xx 0.1/s``."""
    parts = [
        f"{form(name) if are_forms else name} {rate(value)}" for name, value in by_name.items()
    ]
    return ", ".join(parts) or UNKNOWN
