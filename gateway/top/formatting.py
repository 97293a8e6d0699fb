"""Write numbers, times and codes in words and units, or as charts. What is not known is a dash."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from http import HTTPStatus

from gateway.protocol.grpc.status import GrpcStatus

UNKNOWN = "–"

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def _or_dash(say: Callable[[float], str]) -> Callable[[float | None], str]:
    @wraps(say)
    def say_or_dash(value: float | None) -> str:
        return UNKNOWN if value is None else say(value)

    return say_or_dash


def _scaled(value: float) -> tuple[float, str]:
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value /= 1000
        power += 1
    return value, _PREFIXES[power]


@_or_dash
def number(value: float) -> str:
    """Return a number with about three digits; large ones with k, M, G."""
    if abs(value) < 99_950:
        return _digits(value)
    value, prefix = _scaled(value)
    return f"{_digits(value)} {prefix}"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    for least, places in ((9.995, 1), (0.9995, 2), (0.0005, 3)):
        if size >= least:
            return f"{value:.{places}f}".rstrip("0").removesuffix(".")
    return "<0.001" if value else "0"


@_or_dash
def count(value: float) -> str:
    """Return a whole number."""
    return f"{value:,.0f}" if abs(value) < 1e9 else number(value)


def plural(value: float | None, one: str) -> str:
    """Return a number of things."""
    return f"{count(value)} {one if value == 1 else f'{one}s'}"


@_or_dash
def rate(value: float) -> str:
    """Return a rate per second."""
    return f"{number(value)}/s"


@_or_dash
def percent(ratio: float) -> str:
    """Return a ratio in percent."""
    value = 100 * ratio
    if 0 < value < 0.01:
        return "<0.01 %"
    if 99.99 < value < 100:
        return ">99.99 %"
    return f"{f'{value:.2f}'.rstrip('0').removesuffix('.') if value < 1 else number(value)} %"


@_or_dash
def milliseconds(value: float) -> str:
    """Return a duration that is given in milliseconds."""
    return f"{number(value)} ms" if value < 999.5 else seconds(value / 1000)


@_or_dash
def seconds(value: float) -> str:
    """Return a duration, with its two largest units."""
    if value < 1:
        return f"{number(1000 * value)} ms" if value > 0 else "0 s"
    if value < 59.95:
        return f"{number(value)} s"
    whole = round(value)
    amounts = (whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min")
    parts = [*amounts, (whole % 60, "s")]
    first = next(position for position, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)


@_or_dash
def whole_seconds(value: float) -> str:
    """Return a duration in whole seconds and above, which do not flicker."""
    return seconds(max(0, round(value)))


def last_seconds(value: float | None) -> str:
    """Say of how many seconds percentiles are: a young gateway has less than a minute."""
    return f"last {value:.0f} s" if value is not None and value < 60 else "last minute"


@_or_dash
def size(value: float) -> str:
    """Return a number of bytes."""
    value, prefix = _scaled(value)
    return f"{_digits(value)} {prefix}B" if prefix else f"{value:.0f} B"


@_or_dash
def size_rate(value: float) -> str:
    """Return bytes per second."""
    return f"{size(value)}/s"


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
        then, today = datetime.fromtimestamp(at), datetime.fromtimestamp(now).date()
    except (OverflowError, ValueError, OSError):
        return UNKNOWN
    day = "" if then.date() == today else f"{then.date()} "
    return day + then.time().isoformat("milliseconds" if exact else "seconds")


def short_clock(at: float | None, now: float) -> str:
    """Return the local time of day, or only the date if that was another day: 8 characters."""
    text = clock(at, now)
    return text if len(text) <= 8 else text[2:10]


_WORDS = {int(each): each.phrase.capitalize() for each in HTTPStatus} | {
    200: "OK",
    401: "Not authenticated",
    408: "Client too slow",
    413: "Too large",
    414: "URL too long",
    421: "Wrong host",
    422: "Not processable",
    431: "Header too large",
    499: "Client left",
    500: "Server error",
    503: "Unavailable",
    504: "Timeout",
    507: "No memory",
}
"""Short words for the statuses of HTTP."""
_GRPC = {int(each): each.name.replace("_", " ").lower() for each in GrpcStatus} | {0: "OK"}
_FORMS = {"json": "JSON", "raw": "raw bytes", "v1": "V1 JSON", "grpc": "gRPC", "": "as sent"}
PROTOCOLS = {"http": "HTTP", "grpc": "gRPC"}


def call_status(status: int, grpc_status: int | None) -> str:
    """Return how a call ended: ``503 Unavailable``, ``gRPC 14 unavailable``."""
    http = f"{status} {_WORDS.get(status, '')}".rstrip() if status else "aborted"
    if grpc_status is None:
        return http
    grpc = f"gRPC {grpc_status} {_GRPC.get(grpc_status, '')}".rstrip()
    return grpc if status == 200 else f"{http}, {grpc}"


def form(name: str) -> str:
    """Return the name of a form of infer requests."""
    return _FORMS.get(name, name)


def forms(client: str, server: str) -> str:
    """Return the form of a client, and that of the server if it differs."""
    if not client and not server:
        return UNKNOWN
    return form(client) if server in ("", client) else f"{form(client)} → {form(server)}"


def rates(by_name: Mapping[str, float], name_of: Callable[[str], str] = str) -> str:
    """Return rates by name: ``2xx 10.1/s, 4xx 0.1/s``."""
    return ", ".join(f"{name_of(name)} {rate(each)}" for name, each in by_name.items()) or UNKNOWN


_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = 8

Points = Sequence[float | None]


def sparkline(points: Points, height: int = 1, top: float | None = None) -> list[str]:
    """Return the rows of a chart, the highest first; a point that is not known is a gap.

    ``top`` is the value of the full height: without it, the highest point.
    """
    highest = max((each for each in points if each is not None), default=0.0)
    full = max(highest, top or 0.0)
    eighths = [_height(each, full, height * _EIGHTHS) for each in points]
    return [
        "".join(_BLOCKS[max(0, min(_EIGHTHS, each - row * _EIGHTHS))] for each in eighths)
        for row in reversed(range(height))
    ]


def _height(value: float | None, full: float, most: int) -> int:
    """Return a height in eighths; what is above 0 is higher than 0, which is one eighth."""
    if value is None:
        return 0
    if value <= 0 or full <= 0:
        return 1
    return max(2, min(most, round(value / full * most)))


def squeeze(points: Points, end: float, step: float, width: int) -> tuple[list[float | None], int]:
    """Return the highest points of equal spans, at most ``width``, and how many points a span has.

    The spans stand still while new points come: they begin at multiples of their length.
    """
    if not points or width < 1 or step <= 0:
        return [], 1
    span = max(1, math.ceil((len(points) + 1) / width)) if len(points) > width else 1
    if span == 1:
        return list(points), 1
    last = int(end / step)
    spans: dict[int, float | None] = {}
    for position, value in enumerate(points):
        key = (last - len(points) + 1 + position) // span
        known = spans.get(key)
        spans[key] = known if value is None or (known or 0) > value else value
    return list(spans.values())[-width:], span
