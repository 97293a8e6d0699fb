"""The recent calls, the last events of the journal, and the choice among them by a query."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

_MAX_TEXT = 500


def parse_text(query: Mapping[str, str], name: str) -> str:
    """Return a text of a query, cut to a length that is easy to search for; empty without one."""
    return query.get(name, "")[:_MAX_TEXT]


def parse_count(query: Mapping[str, str], name: str, default: int, most: int = 10**9) -> int:
    """Return a number of a query, which is at most ``most``. Raises ValueError."""
    text = query.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > len(str(10**9)):
        raise ValueError(f"{name}: expected a number, got {text[:100]!r}")
    return min(int(text), most)


def parse_number(query: Mapping[str, str], name: str) -> float | None:
    """Return a number with a fraction of a query; None without one. Raises ValueError."""
    if not (text := query.get(name, "")):
        return None
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise ValueError(f"{name}: expected a number, got {text[:100]!r}")


_MAX_EVENTS = 1000
_DEFAULT_CALLS, _MAX_CALLS = 200, 2000
_STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx", "aborted")
_NAMES = ("model", "upstream", "endpoint", "route", "request_id", "trace_id", "operation")

Call = Mapping[str, Any]


def parse_filter(query: Mapping[str, str]) -> tuple[Callable[[Call], bool], int]:
    """Return what tells whether a call is to be shown, and how many are. Raises ValueError.

    All that a query names has to fit.
    """
    names = _parse_names(query, _NAMES)
    status = parse_text(query, "status")
    if status and status not in _STATUSES:
        raise ValueError(f"status: expected one of {', '.join(_STATUSES)}, got {status!r}")
    only_errors = query.get("errors", "") not in ("", "0", "false")
    min_ms = parse_number(query, "min_ms") or 0.0
    search = parse_text(query, "search").lower()

    def fits(call: Call) -> bool:
        return (
            all(call.get(name) == text for name, text in names.items())
            and (not status or _status_class(call["status"]) == status)
            and (not only_errors or has_failed(call))
            and call["duration_ms"] >= min_ms
            and (not search or any(search in text.lower() for text in _texts(call)))
        )

    return fits, parse_count(query, "limit", _DEFAULT_CALLS, _MAX_CALLS)


def matching_calls(
    encoded: Iterable[bytes], fits: Callable[[Call], bool], limit: int
) -> list[Call]:
    """Return the calls that fit, newest first."""
    calls = [call for each in encoded if fits(call := orjson.loads(each))]
    calls.sort(key=lambda call: call["time"], reverse=True)
    return calls[:limit]


def _texts(call: Call) -> Iterator[str]:
    for value in call.values():
        if not isinstance(value, list):
            yield str(value)
    for attempt in call.get("other_attempts", ()):
        yield attempt["endpoint"]


def _status_class(status: int) -> str:
    return f"{status // 100}xx" if status else "aborted"


def has_failed(call: Call) -> bool:
    """Tell whether a call has failed, by whose fault ever."""
    return bool(call.get("reason")) or not 0 < call["status"] < 400


def describe_journal(
    time: float, events: Sequence[Call], query: Mapping[str, str]
) -> dict[str, Any]:
    """Return the events that fit, newest first. Raises ValueError."""
    limit = parse_count(query, "limit", _MAX_EVENTS, _MAX_EVENTS)
    seconds = parse_number(query, "seconds")
    search = parse_text(query, "search").lower()
    names = _parse_names(query, ("kind", "level", "upstream", "endpoint"))
    fitting = [
        event
        for event in events
        if (seconds is None or event["time"] >= time - seconds)
        and all(event[name] == text for name, text in names.items())
        and (not search or any(search in str(value).lower() for value in event.values()))
    ]
    return {"time": time, "kept": len(events), "fitting": len(fitting), "events": fitting[:limit]}


def _parse_names(query: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the fields that a query names, with their texts."""
    return {name: text for name in names if (text := parse_text(query, name))}
