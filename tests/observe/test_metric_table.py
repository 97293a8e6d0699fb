"""The array of a family's series is what the store sums up, row for row."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.observe.metric_store import (
    OTHER,
    CounterFamily,
    Family,
    HistogramFamily,
    Labels,
    MetricStore,
)
from gateway.observe.metric_table import MetricTable, RecentHistograms, quantiles
from tests.observe.dying import run_in_a_child

CALLS = CounterFamily("calls", "Calls.", ("model", "status"))
PLAIN = CounterFamily("plain", "Without labels.")
SECONDS = HistogramFamily("seconds", "Seconds.", ("model",), (0.5, 1.0, 4.0))
FAMILIES: tuple[Family, ...] = (CALLS, PLAIN, SECONDS)

AMOUNTS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, 100.0])
"""Their sums are exact in any order."""
OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(FAMILIES),
        st.sampled_from(["a", "b", "", OTHER, "模型", "x" * 300]) | st.text(max_size=4),
        AMOUNTS,
        st.booleans(),
    ),
    max_size=40,
)


def _count(store: MetricStore, segment: int, family: Family, label: str, amount: float) -> None:
    writer, labels = store.writer(segment), (label,) * len(family.labels)
    if isinstance(family, CounterFamily):
        writer.counter(family, labels).add(amount)
    else:
        writer.histogram(family, labels).observe(amount)


def _as_sums(table: MetricTable) -> dict[Labels, list[float]]:
    words = table.read()
    assert words.shape == (len(table.labels), table.family.words)
    return dict(zip(table.labels, words.tolist(), strict=True))


@given(OPERATIONS)
def test_table_shows_what_the_store_sums_up(
    operations: list[tuple[int, Family, str, float, bool]],
) -> None:
    """It is read now and then, so it learns of series little by little."""
    store = MetricStore(FAMILIES, segments=3)
    tables = {family: MetricTable(store, family) for family in FAMILIES}
    for segment, family, label, amount, is_read in operations:
        _count(store, segment, family, label, amount)
        if is_read:
            tables[family].read()
    for family, table in tables.items():
        before = list(table.labels)
        shown, sums = _as_sums(table), store.sums(family)
        assert table.labels[: len(before)] == before
        assert len(shown) == len(table.labels)
        # The series for those without room is there before it is used.
        unused = (OTHER,) * len(family.labels)
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
