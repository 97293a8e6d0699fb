"""The recent calls, the last events of the journal, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson

from gateway.admin.panels.query import parse_count, parse_number, parse_text

_MAX_EVENTS = 1000
_DEFAULT_CALLS, _MAX_CALLS = 200, 2000
_STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx", "aborted")
_NAMES = ("model", "upstream", "endpoint", "route", "request_id", "trace_id", "operation")

Call = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallFilter:
    """Which calls to show: all of these have to fit."""

    names: Mapping[str, str]
    """Fields of which each has to be this text."""
    status: str
    only_errors: bool
    min_ms: float | None
    search: str
    """A text in any field."""
    limit: int

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Self:
        """Read a query. Raises ValueError."""
        status = parse_text(query, "status")
        if status and status not in _STATUSES:
            raise ValueError(f"status: expected one of {', '.join(_STATUSES)}, got {status!r}")
        return cls(
            _parse_names(query, _NAMES),
            status,
            query.get("errors", "") not in ("", "0", "false"),
            parse_number(query, "min_ms"),
            parse_text(query, "search").lower(),
            parse_count(query, "limit", _DEFAULT_CALLS, _MAX_CALLS),
        )

    def fits(self, call: Call) -> bool:
        """Tell whether a call is to be shown."""
        if any(call.get(name) != text for name, text in self.names.items()):
            return False
        if self.status and _status_class(call["status"]) != self.status:
            return False
        if self.only_errors and not has_failed(call):
            return False
        if self.min_ms is not None and call["duration_ms"] < self.min_ms:
            return False
        return not self.search or any(self.search in text.lower() for text in _texts(call))


def matching_calls(encoded: Iterable[bytes], chosen: CallFilter) -> list[Call]:
    """Return the calls that fit, newest first."""
    calls = [call for each in encoded if chosen.fits(call := orjson.loads(each))]
    calls.sort(key=lambda call: call["time"], reverse=True)
    return calls[: chosen.limit]


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
    return {
        "time": time,
        "kept": len(events),
        "fitting": len(fitting),
        "events": fitting[:limit],
    }


def _parse_names(query: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the fields that a query names, with their texts."""
    return {name: text for name in names if (text := parse_text(query, name))}
