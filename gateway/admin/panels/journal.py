"""The journal: which of the last events to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.admin.panels.query import parse_count, parse_number, parse_text

_MOST = 1000

Event = Mapping[str, Any]


def describe_journal(
    time: float, events: Sequence[Event], query: Mapping[str, str]
) -> dict[str, Any]:
    """Return the events that fit, newest first. Raises ValueError."""
    limit = parse_count(query, "limit", _MOST, _MOST)
    seconds = parse_number(query, "seconds")
    search = parse_text(query, "search").lower()
    names = {
        name: text
        for name in ("kind", "level", "upstream", "endpoint")
        if (text := parse_text(query, name))
    }
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
