"""Counters and histograms of several processes, in memory that they share.

Each process writes a segment of its own, and any process reads all segments. So any process shows
the sum, and the numbers of a killed process stay: its successor finds them in the segment and goes
on counting. No process locks or waits.

What a reader sees while others write, and after one was killed at any moment:

- Each number is whole, as it is one aligned word of 64 bits. An amount is counted or it is not.
- A series is complete or not there. The writer writes an entry behind the last one, and then
  publishes its end in one word. A checksum tells other processors whether the entry has arrived.
- A histogram is several words, and a value is counted before it is added to the sum. The sum may
  lack values that were counted while it was read. If a process is killed between the count and the
  sum, the sum lacks that value for good.

A segment begins with words: the end of its last entry, how often it was full, and one cell for
each family. Entries follow, each with a header, the labels as JSON, and the words of its cell.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import orjson

from gateway.errors import replace_surrogates
from gateway.observe.metric_cells import Counter, Histogram

MAX_LABEL = 200
"""Characters of a label value; a longer one is cut and ends with dots."""
OTHER: Final = "other"
"""Each label value of the series that counts for those without room."""

_WORD = 8
_END, _FULL, _FIRST_CELL = 0, 1, 2
"""The words at the start of a segment."""
_HEADER = struct.Struct("=II")
"""Of an entry: the length of the labels' text, and its checksum."""
_RESERVED_SHARE = 4
"""Addresses may change for ever: series of endpoints leave a part of a segment, one of so many."""
_CHECKSUM_START = 1
"""Not 0, so that zeros are no valid entry."""

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CounterFamily:
    """Declares counters, one for each combination of label values."""

    name: str
    """Without ``_total``, which the text format adds."""
    documentation: str
    labels: Labels = ()

    @property
    def words(self) -> int:
        """The words of one series."""
        return 1


@dataclass(frozen=True, slots=True)
class HistogramFamily:
    """Declares histograms, one for each combination of label values."""

    name: str
    documentation: str
    labels: Labels
    buckets: tuple[float, ...]
    """The rising upper bounds, each within its bucket; a bucket for larger values is added."""
    is_internal: bool = False
    """It is no metric: the gateway alone reads it, for percentiles."""

    @property
    def words(self) -> int:
        """The words of one series: the sum, one for each bucket, and one for larger values."""
        return len(self.buckets) + 2


@dataclass(frozen=True, slots=True)
class CountFamily:
    """Declares a counter of the values in each histogram of a family, which takes no memory."""

    name: str
    documentation: str
    histograms: HistogramFamily


Family = CounterFamily | HistogramFamily


class MetricStore:
    """Sums up the counters and histograms of all processes that are forked after it is made.

    ``size`` is in bytes for each segment. Memory is used as series are added. Raises ValueError if
    a segment has no room for a series of each family.
    """

    def __init__(
        self, families: Sequence[Family | CountFamily], segments: int = 1, size: int = 16 << 20
    ) -> None:
        self.shown = tuple(each for each in families if not getattr(each, "is_internal", False))
        """The families that are metrics."""
        self._families = tuple(each for each in families if not isinstance(each, CountFamily))
        self.segments = segments
        self._segments = [_Segment(self._families, size) for _ in range(segments)]

    def writer(self, segment: int) -> MetricWriter:
        """Return the writer of a segment, for one process at a time.

        It goes on with the series that an earlier process left there. Raises IndexError if there is
        no such segment.
        """
        return MetricWriter(self._families, self._segments[segment])

    @property
    def full(self) -> int:
        """How often a series was asked for that had no room, in all segments."""
        return sum(int(segment.words[_FULL]) for segment in self._segments)

    def sums(self, family: Family) -> dict[Labels, list[float]]:
        """Return the words of each series of a family, summed over all processes.

        Those of a histogram are the sum, and the number of values in each bucket. A family without
        labels always has its series. May be called in any thread. Raises ValueError if the store
        does not have the family.
        """
        sums: dict[Labels, list[float]] = {}
        for words, first_words in self.cells(family):
            for labels, at in first_words.items():
                values = list(words[at : at + family.words])
                if (others := sums.get(labels)) is not None:
                    values = [a + b for a, b in zip(others, values, strict=True)]
                sums[labels] = values
        shared = (OTHER,) * len(family.labels)
        if shared and not any(sums[shared]):
            del sums[shared]  # the series that others share, which was not used
        return sums

    def cells(self, family: Family) -> Iterator[tuple[memoryview[float], dict[Labels, int]]]:
        """Yield the words of each segment, and which of them is the first of each series.

        Series are added at the end, and none is removed. Raises ValueError if the store does not
        have the family.
        """
        index = self._families.index(family)
        for segment in self._segments:
            segment.read_entries()
            yield segment.words, segment.cells[index].copy()  # its writer may add series meanwhile

    def label_values(self, family: Family, label: str) -> set[str]:
        """Return the values of a label in the series of a family, in all processes."""
        position = family.labels.index(label)
        return {labels[position] for _, series in self.cells(family) for labels in series}


class MetricWriter:
    """Finds the counters and histograms of one process, and makes new ones.

    If the segment has no room for a new series, the caller gets one that all such series of the
    family share: each of its label values is "other". Families whose series come and go, such as
    those with addresses, leave a quarter of the room to others. A lookup takes about two
    microseconds, so callers keep what they get.
    """

    def __init__(self, families: tuple[Family, ...], segment: _Segment) -> None:
        self._indexes = {family: index for index, family in enumerate(families)}
        self._segment = segment
        self._lock = threading.Lock()
        """A reload builds parts, with their counters, in a thread."""
        self._counters: dict[int, Counter] = {}
        self._histograms: dict[int, Histogram] = {}
        """One object for each series, by its first word: it knows the numbers."""

    def counter(self, family: CounterFamily, labels: Labels = ()) -> Counter:
        """Return the counter with these label values, in the order of the family's labels.

        Raises ValueError if there are too few values or too many, and KeyError if the store does
        not have the family.
        """
        with self._lock:
            at = self._segment.find(self._indexes[family], labels)
            if (counter := self._counters.get(at)) is None:
                counter = self._counters[at] = Counter(self._segment.words, at)
            return counter

    def histogram(self, family: HistogramFamily, labels: Labels = ()) -> Histogram:
        """Return the histogram with these label values, as ``counter`` does."""
        with self._lock:
            at = self._segment.find(self._indexes[family], labels)
            if (histogram := self._histograms.get(at)) is None:
                histogram = Histogram(self._segment.words, at, family.buckets)
                self._histograms[at] = histogram
            return histogram


class _Segment:
    """Memory that one process at a time writes, and all read."""

    def __init__(self, families: tuple[Family, ...], size: int) -> None:
        self._memory = memoryview(mmap.mmap(-1, size - size % _WORD))
        self.words = self._memory.cast("d")
        self._ends = self._memory.cast("Q")
        self._families = families
        self.cells: list[dict[Labels, int]] = []
        """For each family, which word is the first of a series; as far as this process knows."""
        self._shared_cells: list[int] = []
        """For each family, the first word of the series that others share."""
        end = _FIRST_CELL
        for family in families:
            self.cells.append({(OTHER,) * len(family.labels): end})
            self._shared_cells.append(end)
            end += family.words
        if end > len(self.words):
            raise ValueError(f"the families take {end * _WORD} bytes, the segment has {size}")
        self._known_end = self._ends[_END] = end * _WORD

    def find(self, index: int, labels: Labels) -> int:
        """Return the first word of a series, which is made if need be."""
        cells = self.cells[index]
        at = cells.get(labels)
        if at is None:
            family = self._families[index]
            if len(labels) != len(family.labels):
                raise ValueError(f"{family.name} has the labels {family.labels}, not {labels}")
            labels = tuple(map(clean_label, labels))
            self.read_entries()
            at = cells.get(labels)
        if at is not None:
            return at
        if not self._append_entry(index, labels):
            self.words[_FULL] += 1
            return self._shared_cells[index]
        self.read_entries()
        return cells[labels]

    def _append_entry(self, index: int, labels: Labels) -> bool:
        """Write and publish a series with zeros, if it has room."""
        text = orjson.dumps([index, *labels])
        header = _HEADER.pack(len(text), crc32(text, _CHECKSUM_START))
        zeros = bytes(_WORD * self._families[index].words)
        # A process may have been killed here: the zeros also replace what it left.
        entry = header + text + bytes(-len(text) % _WORD) + zeros
        start = self._ends[_END]
        end = start + len(entry)
        room = len(self._memory)
        if "endpoint" in self._families[index].labels:
            room -= room // _RESERVED_SHARE
        if end > room:
            return False
        self._memory[start:end] = entry
        self._ends[_END] = end
        return True

    def read_entries(self) -> None:
        """Learn of the series that were made since the last call."""
        at, end = self._known_end, self._ends[_END]
        while at < end:
            length, checksum = _HEADER.unpack_from(self._memory, at)
            at += _HEADER.size
            text = self._memory[at : at + length]
            if crc32(text, _CHECKSUM_START) != checksum:
                break
            index, *labels = orjson.loads(text)
            at += length + -length % _WORD
            self.cells[index][tuple(labels)] = at // _WORD
            at += _WORD * self._families[index].words
            self._known_end = at


def clean_label(value: str) -> str:
    """Return a label value that UTF-8 can encode, cut to the greatest length."""
    if len(value) > MAX_LABEL:
        value = value[: MAX_LABEL - 3] + "..."
    return replace_surrogates(value)
