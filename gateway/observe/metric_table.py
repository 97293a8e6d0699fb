"""All series of a family as one array, and how they changed lately: for percentiles and history."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gateway.observe.metric_store import Family, HistogramFamily, MetricStore

Words = NDArray[np.float64]

_MINUTE, _HOUR = 60.0, 3600.0
_STEP = 300.0
"""Seconds of the parts of which the last hour is kept."""


class MetricTable:
    """Reads the series of a family, summed over all processes: row for row as in ``labels``.

    A row keeps its place, and new series come at the end. A read of 16,000 histograms takes some
    5 ms.
    """

    def __init__(self, store: MetricStore, family: Family) -> None:
        self.family = family
        self.labels: list[tuple[str, ...]] = []
        self._store = store
        self._rows: dict[tuple[str, ...], int] = {}
        segments = store.segments
        self._known = [0] * segments
        self._first_words = [np.empty(0, np.int64)] * segments
        self._rows_of_segments = [np.empty(0, np.int64)] * segments

    def read(self) -> Words:
        """Return the words of each series: those of a histogram are the sum, then the counts."""
        offsets = np.arange(self.family.words)
        cells = list(self._store.cells(self.family))
        for segment, (_, first_words) in enumerate(cells):
            if len(first_words) != self._known[segment]:
                self._add_series(segment, first_words)
        table = np.zeros((len(self.labels), self.family.words))
        for segment, (words, _) in enumerate(cells):
            found = np.asarray(words)[self._first_words[segment][:, None] + offsets]
            table[self._rows_of_segments[segment]] += found  # each row occurs once
        return table

    def _add_series(self, segment: int, first_words: dict[tuple[str, ...], int]) -> None:
        rows = []
        for labels in first_words:
            row = self._rows.setdefault(labels, len(self.labels))
            if row == len(self.labels):
                self.labels.append(labels)
            rows.append(row)
        self._known[segment] = len(first_words)
        self._first_words[segment] = np.fromiter(first_words.values(), np.int64, len(rows))
        self._rows_of_segments[segment] = np.array(rows, np.int64)


def quantiles(family: HistogramFamily, words: Words, share: float) -> Words:
    """Return the value below which a share of each histogram's values lies; NaN without values.

    ``words`` has a histogram in each row. The value is the middle of its bucket; for values above
    all bounds it is the largest bound.
    """
    counts = words[:, 1:]
    cumulated = counts.cumsum(axis=1)
    total = cumulated[:, -1]
    bucket = np.minimum((cumulated < (share * total)[:, None]).sum(axis=1), counts.shape[1] - 1)
    bounds = np.array([0.0, *family.buckets, family.buckets[-1]])
    return np.where(total > 0, (bounds[bucket] + bounds[bucket + 1]) / 2, np.nan)


@dataclass(frozen=True, slots=True)
class Histograms:
    """The series of a family that got values in some time."""

    seconds: float
    """How long that time was."""
    labels: Sequence[tuple[str, ...]]
    words: Words
    """A row for each of them."""


@dataclass(frozen=True, slots=True)
class _Change:
    """How a table of histograms has changed: by its words in one row, without those that have not.

    A call changes one word of some 400, so that an hour of all series takes little memory.
    """

    began: float
    ended: float
    places: NDArray[np.int32]
    amounts: NDArray[np.float32]


class RecentHistograms:
    """Sums up the values that the histograms of a family got lately, over all processes.

    It knows those of the last minute as of each ``look``, and those of the last hour. What was
    counted before the first look is not known. Times are in seconds, of any clock.
    """

    def __init__(self, store: MetricStore, family: HistogramFamily) -> None:
        self._table = MetricTable(store, family)
        self._width = family.words
        self._words, self._at = np.empty((0, self._width)), 0.0
        self._minute: deque[_Change] = deque()
        self._step_words, self._step_at = self._words, 0.0
        """What was counted when the present step of the hour began."""
        self._hour: deque[_Change] = deque(maxlen=round(_HOUR / _STEP))
        self.known: frozenset[tuple[str, ...]] = frozenset()
        """The labels of the series that had values more than five minutes ago."""
        self._has_looked = False

    def look(self, at: float) -> None:
        """Read what was counted until now; ``at`` is the time."""
        before, since = self._words, self._at
        self._words, self._at = self._table.read(), at
        if not self._has_looked:
            self._step_words, self._step_at, self._has_looked = self._words, at, True
            return
        self._minute.append(_difference(before, self._words, since, at))
        while self._minute[0].ended <= at - _MINUTE:
            self._minute.popleft()
        if at >= self._step_at + _STEP:
            self._hour.append(_difference(self._step_words, self._words, self._step_at, at))
            self._step_words, self._step_at = self._words, at
            self.known = frozenset(self._sum(list(self._hour)[:-1]).labels)

    def latest(self, seconds: float) -> Histograms:
        """Return what was counted in the last seconds, at most a minute: in whole looks."""
        return self._sum([each for each in self._minute if each.ended > self._at - seconds])

    def hour(self) -> Histograms:
        """Return what was counted in the last hour, or up to five minutes more."""
        present = _difference(self._step_words, self._words, self._step_at, self._at)
        return self._sum([*self._hour, present])

    def _sum(self, changes: Sequence[_Change]) -> Histograms:
        if not changes:
            return Histograms(0.0, (), np.empty((0, self._width)))
        places = np.concatenate([each.places for each in changes])
        amounts = np.concatenate([each.amounts for each in changes])
        is_used = np.zeros(len(self._words), np.bool_)
        is_used[places // self._width] = True
        rows, numbers = np.flatnonzero(is_used), is_used.cumsum() - 1
        at = numbers[places // self._width] * self._width + places % self._width
        words = np.asarray(np.bincount(at, amounts, len(rows) * self._width), np.float64)
        labels = [self._table.labels[row] for row in rows.tolist()]
        seconds = self._at - changes[0].began
        return Histograms(seconds, labels, words.reshape(len(rows), self._width))


def _difference(old: Words, new: Words, began: float, ended: float) -> _Change:
    difference = new.copy()
    difference[: len(old)] -= old
    flat = difference.ravel()
    places = np.flatnonzero(flat)
    return _Change(began, ended, places.astype(np.int32), flat[places].astype(np.float32))
