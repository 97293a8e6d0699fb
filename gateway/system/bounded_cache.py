"""A cache that is cleared when it is full: to find the oldest entry would cost more."""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BoundedCache(dict[_Key, _Value]):
    """Caches at most ``max_entries`` values by their keys."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries

    def put(self, key: _Key, value: _Value) -> _Value:
        """Cache a value and return it."""
        if len(self) >= self._max_entries:
            self.clear()
        self[key] = value
        return value
