"""A cache of bounded size, which keeps what is used again however many other keys come.

Clients choose the keys of most caches. One that sends thousands of different ones a second must
not displace the entries of the others: their next calls would have to make these again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final, Generic, ParamSpec, TypeVar, cast

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_MISSES_PER_ENTRY: Final = 16
"""Missed keys that are remembered, for each entry: 8 bytes each."""
_TRIAL_HITS: Final = 64
"""Of hits of keys on trial, one in so many ends the trial: keys in steady use get out of it."""
_WAYS: Final = 16
"""Missed keys of the same place: with few of them, keys used in turn would displace each other."""


class BoundedCache(Generic[_Key, _Value]):
    """Caches values by their keys: the last ``max_entries`` used, and at most four times as many.

    Once it is full, it takes a key at its second miss only, so that keys used once displace
    nothing. Such a key is on trial, which ends well if it is used again after ``max_entries`` more
    have begun theirs: keys used a few times in a row displace only others on trial. That is the
    algorithm 2Q of Johnson and Shasha (1994). An entry is dropped if it was not used while
    ``max_entries`` others were. None is no value: it is not cached.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self.recent: dict[_Key, _Value] = {}
        """Entries that were used lately; a loop may look here first, which saves a call."""
        self._older: dict[_Key, _Value] = {}
        """What was recent before; an entry that is used moves back."""
        self._trial: dict[_Key, _Value] = {}
        """Entries on trial, and those that were so before."""
        self._older_trial: dict[_Key, _Value] = {}
        self._trial_hits = 0
        self._missed = array("q")
        """Hashes of keys missed lately, each in the place that its hash gives."""

    def __len__(self) -> int:
        return len(self.recent) + len(self._older) + len(self._trial) + len(self._older_trial)

    def get(self, key: _Key) -> _Value | None:
        """Return the value of a key; None if it is not cached."""
        value = self.recent.get(key)
        return value if value is not None else self._take_older(key)

    def put(self, key: _Key, value: _Value, mark: object = None) -> _Value:
        """Return the value of a key that was missed, and cache it if it may come again.

        A key that is compared by identity needs a ``mark``, which is compared by value: objects
        that live for a moment have the identities of others before them.
        """
        if value is None:
            return value
        if len(self) < self._max_entries:
            self._keep(key, value)
        elif self._was_missed(key if mark is None else mark):
            if len(self._trial) >= self._max_entries:
                self._older_trial, self._trial = self._trial, {}
            self._trial[key] = value
        return value

    def clear(self) -> None:
        """Drop all entries."""
        self.recent, self._older, self._trial, self._older_trial = {}, {}, {}, {}

    def _take_older(self, key: _Key) -> _Value | None:
        value = self._older.pop(key, None)
        if value is None:
            value = self._older_trial.pop(key, None)
        if value is None:
            value = self._trial.get(key)
            if value is None:
                return None
            self._trial_hits += 1
            if self._trial_hits % _TRIAL_HITS:
                return value
            del self._trial[key]
        self._keep(key, value)
        return value

    def _keep(self, key: _Key, value: _Value) -> None:
        if len(self.recent) >= self._max_entries:
            self._older, self.recent = self.recent, {}
        self.recent[key] = value

    def _was_missed(self, mark: object) -> bool:
        """Tell whether a mark was missed before, and remember it."""
        places = _MISSES_PER_ENTRY // _WAYS * self._max_entries
        if not self._missed:
            self._missed = array("q", bytes(8 * _WAYS * places))
        hashed = hash(mark)
        start = hashed % places * _WAYS
        here = self._missed[start : start + _WAYS]
        if hashed in here:
            return True
        here.pop()
        here.insert(0, hashed)
        self._missed[start : start + _WAYS] = here
        return False


class _CachedFunction:
    """A function of positional arguments, with its results."""

    def __init__(self, function: Callable[..., object], max_entries: int) -> None:
        self._function = function
        self._results: BoundedCache[tuple[object, ...], object] = BoundedCache(max_entries)

    def __call__(self, *arguments: object) -> object:
        result = self._results.get(arguments)
        if result is None:
            result = self._results.put(arguments, self._function(*arguments))
        return result

    def cache_clear(self) -> None:
        """Forget all results."""
        self._results.clear()


def cached(
    max_entries: int,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Cache the results of a function in a BoundedCache, by its positional arguments.

    Neither None nor an exception is cached.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        return cast("Callable[_Parameters, _Result]", _CachedFunction(function, max_entries))

    return decorate
