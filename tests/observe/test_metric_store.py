"""Counters and histograms in memory that processes share, and their series as arrays."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.observe import families
from gateway.observe.metric_cells import PRECISION, FineBuckets
from gateway.observe.metric_store import (
    MAX_LABEL,
    CounterFamily,
    Family,
    HistogramFamily,
    Labels,
    MetricStore,
)
from gateway.observe.metric_table import MetricTable, RecentHistograms, quantiles
from gateway.observe.metrics import StoreCollector
from tests.observe.dying import die_before_store, run_in_a_child
from tests.support.scale import scaled

CALLS = CounterFamily("tensorgate_calls", "Calls.", ("model", "status"))
RESTARTS = CounterFamily("tensorgate_restarts", "Restarts.")
SECONDS = HistogramFamily("tensorgate_seconds", "Seconds of calls.", ("model",), (0.5, 1, 4))
SIZES = HistogramFamily("tensorgate_sizes", "Bytes.", (), (1024, 1e7))
FAMILIES: tuple[Family, ...] = (CALLS, RESTARTS, SECONDS, SIZES)
LE: dict[Family, list[str]] = {SECONDS: ["0.5", "1.0", "4.0"], SIZES: ["1024.0", "1e+07"]}
"""The bounds of the buckets as text."""

Values = dict[tuple[str, Labels], float]
"""The value of each sample, by its name and its label values, sorted by the labels' names."""


def _values(metrics: Iterable[Metric]) -> Values:
    found: Values = {}
    for metric in metrics:
        for sample in metric.samples:
            key = (sample.name, tuple(value for _, value in sorted(sample.labels.items())))
            assert key not in found, "a sample is there twice"
            found[key] = sample.value
    return found


def _shown(store: MetricStore) -> Values:
    return _values(StoreCollector(store).collect())


def _parse_openmetrics(text: str) -> Iterable[Metric]:
    parse: Any = openmetrics_parser.text_string_to_metric_families
    metrics: Iterable[Metric] = parse(text)
    return metrics


def _text(store: MetricStore, generate: Callable[[Any], bytes] = generate_latest) -> str:
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))
    return generate(registry).decode()


def test_series_are_summed_over_segments_and_sorted() -> None:
    store = MetricStore(FAMILIES, segments=2)
    for segment, amount in ((0, 5.5), (1, 40)):
        writer = store.writer(segment)
        for model in ("b", "a")[segment:]:
            writer.counter(CALLS, (model, "200")).add(amount)
            writer.histogram(SECONDS, (model,)).observe(amount)
        writer.counter(RESTARTS).add(1)
    assert _text(store) == (
        "# HELP tensorgate_calls_total Calls.\n"
        "# TYPE tensorgate_calls_total counter\n"
        'tensorgate_calls_total{model="a",status="200"} 45.5\n'
        'tensorgate_calls_total{model="b",status="200"} 5.5\n'
        "# HELP tensorgate_restarts_total Restarts.\n"
        "# TYPE tensorgate_restarts_total counter\n"
        "tensorgate_restarts_total 2.0\n"
        "# HELP tensorgate_seconds Seconds of calls.\n"
        "# TYPE tensorgate_seconds histogram\n"
        + "".join(
            f'tensorgate_seconds_bucket{{le="0.5",model="{model}"}} 0.0\n'
            f'tensorgate_seconds_bucket{{le="1.0",model="{model}"}} 0.0\n'
            f'tensorgate_seconds_bucket{{le="4.0",model="{model}"}} 0.0\n'
            f'tensorgate_seconds_bucket{{le="+Inf",model="{model}"}} {count}\n'
            f'tensorgate_seconds_count{{model="{model}"}} {count}\n'
            f'tensorgate_seconds_sum{{model="{model}"}} {total}\n'
            for model, count, total in (("a", 2.0, 45.5), ("b", 1.0, 5.5))
        )
        + "# HELP tensorgate_sizes Bytes.\n"
        "# TYPE tensorgate_sizes histogram\n"
        'tensorgate_sizes_bucket{le="1024.0"} 0.0\n'
        'tensorgate_sizes_bucket{le="1e+07"} 0.0\n'
        'tensorgate_sizes_bucket{le="+Inf"} 0.0\n'
        "tensorgate_sizes_count 0.0\n"
        "tensorgate_sizes_sum 0.0\n"
    )


def test_store_refuses_a_segment_without_room_for_all_families() -> None:
    with pytest.raises(ValueError, match="the families take 104 bytes, the segment has 103"):
        MetricStore(FAMILIES, size=103)
    store = MetricStore(FAMILIES, size=104)
    store.writer(0).counter(CALLS, ("m", "200")).add(1)
    assert _shown(store)["tensorgate_calls_total", ("other", "other")] == 1


@pytest.mark.parametrize("labels", [(), ("m",), ("m", "200", "more")])
def test_number_of_label_values_must_fit(labels: Labels) -> None:
    with pytest.raises(ValueError, match="tensorgate_calls has the labels"):
        MetricStore(FAMILIES).writer(0).counter(CALLS, labels)


LABELS = {
    "": "",
    'a "b" \\c\\n \n d\\': 'a "b" \\c\\n \n d\\',
    "\0\r\t\x85\u2028 {},=#": "\0\r\t\x85\u2028 {},=#",
    "模型 🙂": "模型 🙂",
    "\ud800a\udfff": "?a?",
    "x" * MAX_LABEL: "x" * 200,
    "x" * (MAX_LABEL + 1): "x" * 197 + "...",
    "🙂" * 10**6: "🙂" * 197 + "...",
}


@pytest.mark.parametrize(("given", "shown"), LABELS.items(), ids=range(len(LABELS)))
def test_label_values_of_any_characters_are_shown(given: str, shown: str) -> None:
    store = MetricStore(FAMILIES, segments=2)
    for segment in range(2):
        for _ in range(2):
            store.writer(segment).counter(CALLS, (given, "200")).add(1)
    assert _shown(store)["tensorgate_calls_total", (shown, "200")] == 4
    parsed = _values(parse_text(_text(store)))
    assert parsed["tensorgate_calls_total", (shown, "200")] == 4
    parsed = _values(_parse_openmetrics(_text(store, generate_openmetrics)))
    assert parsed["tensorgate_calls_total", (shown, "200")] == 4


AMOUNTS = st.sampled_from([0.0, 1.0, 3.0, 0.0625, 4096.0, 2.0**40])
"""Their sums are exact, in whatever order they are added."""
Operation = tuple[int, Family, str, float]
OPERATION: st.SearchStrategy[Operation] = st.tuples(
    st.integers(0, 2),
    st.sampled_from(FAMILIES),
    st.sampled_from("ab") | st.just("other") | st.text(max_size=250),
    AMOUNTS,
)
OPERATIONS = st.lists(OPERATION, max_size=30)


def _labels(family: Family, label: str) -> Labels:
    return (label,) * len(family.labels)


def _count(store: MetricStore, segment: int, family: Family, label: str, amount: float) -> None:
    """Count an amount with a new writer, as the successor of a process does."""
    writer = store.writer(segment)
    if isinstance(family, CounterFamily):
        writer.counter(family, _labels(family, label)).add(amount)
    else:
        writer.histogram(family, _labels(family, label)).observe(amount)


class _Model:
    """What a store has to show, in plain Python."""

    def __init__(self) -> None:
        self.counted: dict[tuple[Family, Labels], list[float]] = {
            (RESTARTS, ()): [],
            (SIZES, ()): [],
        }

    def count(self, family: Family, label: str, amount: float) -> None:
        cut = label if len(label) <= MAX_LABEL else label[:197] + "..."
        self.counted.setdefault((family, _labels(family, cut)), []).append(amount)

    def values(self) -> Values:
        found: Values = {}
        for (family, labels), amounts in self.counted.items():
            if isinstance(family, CounterFamily):
                if labels != ("other", "other") or any(amounts):
                    found[family.name + "_total", labels] = sum(amounts)
                continue
            for text, bound in [*zip(LE[family], family.buckets, strict=True), ("+Inf", 2.0**99)]:
                in_bucket = sum(amount <= bound for amount in amounts)
                found[family.name + "_bucket", (text, *labels)] = in_bucket
            found[family.name + "_count", labels] = len(amounts)
            found[family.name + "_sum", labels] = sum(amounts)
        return found


@given(OPERATIONS, st.integers(104, 4000))
def test_store_shows_what_was_counted(operations: list[Operation], size: int) -> None:
    store = MetricStore(FAMILIES, segments=3, size=size)
    model = _Model()
    for segment, family, label, amount in operations:
        full = store.full
        _count(store, segment, family, label, amount)
        assert store.full <= full + 1
        model.count(family, "other" if store.full > full else label, amount)
        assert _shown(store) == model.values()
    assert _values(parse_text(_text(store))) == model.values()


@settings(max_examples=scaled(30))
@given(OPERATIONS, st.integers(1, 20))
def test_store_shows_what_processes_counted(operations: list[Operation], each: int) -> None:
    store = MetricStore(FAMILIES, segments=3)
    model = _Model()
    while operations:
        life, operations = operations[:each], operations[each:]

        def run(life: list[Operation] = life) -> None:
            for operation in life:
                _count(store, *operation)

        assert run_in_a_child(run) == 0
        for _, family, label, amount in life:
            model.count(family, label, amount)
    # Not read before: each process finds by itself what others have left.
    assert _shown(store) == model.values()
    assert store.full == 0


def test_writer_has_one_object_for_each_series() -> None:
    """Each object knows the numbers that it has written, so there must not be two."""
    store = MetricStore(FAMILIES, size=2048)
    writer = store.writer(0)
    assert writer.counter(CALLS, ("m", "200")) is writer.counter(CALLS, ("m", "200"))
    for number in range(100):
        writer.counter(CALLS, (f"m{number}", "200"))
    assert store.full
    assert writer.counter(CALLS, ("x", "1")) is writer.counter(CALLS, ("y", "2"))


def test_any_thread_collects_while_series_are_made() -> None:
    store = MetricStore(FAMILIES)
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(1) as executor:
            made = executor.submit(_make_series, store, 500)
            while not made.done():
                assert set(_calls(store)) <= {0, 1}
            made.result()
    finally:
        sys.setswitchinterval(switch_interval)
    assert _calls(store) == [1] * 500


def _make_series(store: MetricStore, count: int) -> None:
    writer = store.writer(0)
    for number in range(count):
        writer.counter(CALLS, (f"{number}", "200")).add(1)


def _calls(store: MetricStore) -> list[float]:
    return [sample.value for sample in next(StoreCollector(store).collect()).samples]


@pytest.mark.parametrize(("size", "full"), [(56, 0), (55, 1)])
def test_segment_is_used_up_to_its_end(size: int, full: int) -> None:
    # 24 bytes for the segment, a header of 8, [0,"m","200"] in 16, and a word.
    store = MetricStore([CALLS], size=size)
    store.writer(0).counter(CALLS, ("m", "200")).add(1)
    assert store.full == full


def test_entry_that_has_not_arrived_is_ignored_until_it_does() -> None:
    """Another processor may see the end of an entry before it sees the entry."""
    store = MetricStore(FAMILIES)
    assert run_in_a_child(lambda: _count(store, 0, CALLS, "a", 1)) == 0
    [segment] = store._segments
    start, end = segment._known_end, segment._ends[0]
    entry = bytes(segment._memory[start:end])
    for missing in range(start, end - 8):
        for hidden in (slice(missing, missing + 8), slice(missing, end)):
            segment._memory[hidden] = bytes(hidden.stop - hidden.start)
            changed = bytes(segment._memory[start : end - 8]) != entry[:-8]
            keys = _shown(store)
            assert (("tensorgate_calls_total", ("a", "a")) in keys) != changed
            segment._memory[start:end] = entry
            segment._known_end = start
            segment.cells[0].pop(("a", "a"), None)
    assert _shown(store)["tensorgate_calls_total", ("a", "a")] == 1


NEW = "new" * 20


def test_process_killed_between_any_two_opcodes_leaves_whole_series() -> None:
    """The shared memory changes where Python stores items, and nowhere else."""
    for number in count():
        store = MetricStore(FAMILIES, size=4096)
        store.writer(0).counter(CALLS, ("before", "200")).add(5)

        def run(store: MetricStore = store, number: int = number) -> None:
            writer = store.writer(0)
            die_before_store(number)
            writer.counter(CALLS, (NEW, "200")).add(1)
            writer.histogram(SECONDS, (NEW,)).observe(0.25)

        status = run_in_a_child(run)
        values = _shown(store)
        assert values == _values(parse_text(_text(store)))
        counted = values.get(("tensorgate_calls_total", (NEW, "200")), 0)
        observed = values.get(("tensorgate_seconds_count", (NEW,)), 0)
        total = values.get(("tensorgate_seconds_sum", (NEW,)), 0)
        assert counted in (0, 1)
        assert (observed, total) in ((0, 0), (1, 0), (1, 0.25))
        assert counted >= observed
        # Its successor writes shorter and longer entries over what is left of its entry.
        successor = store.writer(0)
        for model in ("n", NEW, NEW + "er"):
            successor.counter(CALLS, (model, "200")).add(1)
            successor.histogram(SECONDS, (model,)).observe(0.5)
        values = _shown(store)
        assert values == _values(parse_text(_text(store)))
        for model, calls, observations, seconds in (
            ("n", 1, 1, 0.5),
            (NEW, counted + 1, observed + 1, total + 0.5),
            (NEW + "er", 1, 1, 0.5),
        ):
            assert values["tensorgate_calls_total", (model, "200")] == calls
            assert values["tensorgate_seconds_count", (model,)] == observations
            assert values["tensorgate_seconds_sum", (model,)] == seconds
        assert values["tensorgate_calls_total", ("before", "200")] == 5
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert (counted, observed, total) == (1, 1, 0.25)
    # At least two entries and their two ends: compiled code stores amounts without an opcode.
    assert number >= 4


def test_internal_family_is_no_metric() -> None:
    inner = HistogramFamily("inner", "Seconds.", ("model",), (1.0, 2.0), is_internal=True)
    store = MetricStore([inner, CALLS])
    histogram = store.writer(0).histogram(inner, ("m",))
    histogram.count(histogram.bucket(1.5))
    assert store.sums(inner)["m",] == [0, 0, 1, 0]
    assert [metric.name for metric in StoreCollector(store).collect()] == [CALLS.name]


@given(st.floats(0.0005, 300) | st.sampled_from([0.0005, 0.001, 0.1, 2.0, 2.5, 60.0, 300.0]))
def test_middle_of_a_fine_bucket_is_within_two_percent(value: float) -> None:
    bounds = tuple(float(bound) for bound in families.DURATION.buckets)
    fine, coarse = FineBuckets(bounds), 1 + sum(value > bound for bound in bounds)
    part = fine.find(coarse, value)
    low, high = (0.0, *fine.bounds)[part - 1], fine.bounds[part - 1]
    assert low * (1 - 1e-12) <= value <= high * (1 + 1e-12)
    assert (low + high) / 2 == pytest.approx(value, rel=PRECISION * 1.001)


def test_fine_buckets_divide_the_coarse_ones() -> None:
    fine = FineBuckets(families.DURATION.buckets)
    assert set(families.DURATION.buckets) <= set(fine.bounds)
    assert list(fine.bounds) == sorted(set(fine.bounds))
    assert fine.find(len(families.DURATION.buckets) + 1, 5000.0) == len(fine.bounds) + 1
    assert fine.find(1, 0.0) == 1


# Tables of all series of a family


def _as_sums(table: MetricTable) -> dict[Labels, list[float]]:
    words = table.read()
    assert words.shape == (len(table.labels), table.family.words)
    return dict(zip(table.labels, words.tolist(), strict=True))


@given(st.lists(st.tuples(OPERATION, st.booleans()), max_size=40))
def test_table_shows_what_the_store_sums_up(operations: list[tuple[Operation, bool]]) -> None:
    """It is read now and then, so it learns of series little by little."""
    store = MetricStore(FAMILIES, segments=3)
    tables = {family: MetricTable(store, family) for family in FAMILIES}
    for (segment, family, label, amount), is_read in operations:
        _count(store, segment, family, label, amount)
        if is_read:
            tables[family].read()
    for family, table in tables.items():
        before = list(table.labels)
        shown, sums = _as_sums(table), store.sums(family)
        assert table.labels[: len(before)] == before
        assert len(shown) == len(table.labels)
        # The series for those without room is there before it is used.
        unused = ("other",) * len(family.labels)
        assert {unused: [0.0] * family.words, **sums} == shown


def test_series_of_other_processes_are_read() -> None:
    store = MetricStore(FAMILIES, segments=2)
    table = MetricTable(store, SECONDS)
    assert table.read().tolist() == [[0] * 5]
    assert run_in_a_child(lambda: _count(store, 0, SECONDS, "m", 2.0)) == 0
    assert run_in_a_child(lambda: _count(store, 1, SECONDS, "m", 0.5)) == 0
    assert _as_sums(table)["m",] == [2.5, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([0, 0, 0, 0], math.nan),
        ([0, 0, 0, 7], 4.0),
        ([4, 0, 0, 0], 0.25),
        ([0, 4, 0, 0], 0.75),
        ([1, 0, 0, 1], 0.25),
        ([0, 0, 1, 0], 2.5),
    ],
)
def test_median_is_the_middle_of_its_bucket(counts: list[int], expected: float) -> None:
    (found,) = quantiles(SECONDS, np.array([[0.0, *counts]]), 0.5)
    assert found == pytest.approx(expected, nan_ok=True)


def test_recent_values_are_those_since_a_time_over_all_processes() -> None:
    store = MetricStore(FAMILIES, segments=2)
    recent = RecentHistograms(store, SECONDS)
    _count(store, 0, SECONDS, "m", 100.0)
    recent.look(100.0)
    assert recent.latest(60.0).labels == ()
    for second, (label, amount) in enumerate([("m", 0.25), ("n", 3.0), ("m", 100.0)]):
        _count(store, second % 2, SECONDS, label, amount)
        recent.look(101.0 + second)
    found = recent.latest(1.0)
    assert found.seconds == 1
    assert list(found.labels) == [("m",)]
    assert found.words.tolist() == [[100.0, 0, 0, 0, 1]]
    found = recent.latest(60.0)
    assert found.seconds == 3
    words = dict(zip(found.labels, found.words.tolist(), strict=True))
    assert words == {("m",): [100.25, 1, 0, 0, 1], ("n",): [3.0, 0, 0, 1, 0]}
    recent.look(162.5)
    found = recent.latest(60.0)
    assert (found.seconds, found.labels) == (60.5, [("m",)])


def test_values_of_an_hour_are_those_of_the_last_steps_and_of_now() -> None:
    store = MetricStore(FAMILIES)
    recent = RecentHistograms(store, SECONDS)
    recent.look(0.0)
    _count(store, 0, SECONDS, "old", 0.25)
    for minute in range(1, 66):
        _count(store, 0, SECONDS, "m", 0.25)
        recent.look(60.0 * minute)
        hour = recent.hour()
        words = dict(zip(hour.labels, hour.words[:, 1].tolist(), strict=True))
        assert (("m",) in recent.known) == (minute >= 10)
        if minute < 65:
            assert hour.seconds == 60 * minute
            assert words == {("m",): minute, ("old",): 1}
    assert hour.seconds == 3600
    assert words == {("m",): 60}
