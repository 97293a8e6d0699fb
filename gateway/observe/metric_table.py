"""All series of a family as one array: for the history of the admin page."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gateway.observe.metric_store import Family, HistogramFamily, MetricStore

Words = NDArray[np.float64]


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
