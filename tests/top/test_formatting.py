"""Numbers, times and codes in words and units, and as charts; documents of other versions."""

import time

import pytest

from gateway.top import document, formatting
from gateway.top.formatting import sparkline, squeeze


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.0001, "<0.001"),
        (0.0005, "0.001"),
        (1.234, "1.23"),
        (9.999, "10"),
        (99.96, "100"),
        (99_949, "99,949"),
        (99_951, "100 k"),
        (1_234_567, "1.23 M"),
        (1e30, "1,000,000,000,000 E"),
    ],
)
def test_a_number_has_about_three_digits(value: float | None, text: str) -> None:
    assert formatting.number(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (0.00001, "<0.01 %"),
        (0.0031, "0.31 %"),
        (0.5, "50 %"),
        (0.99999, ">99.99 %"),
        (1.0, "100 %"),
    ],
)
def test_a_ratio_is_in_percent_and_never_rounded_to_all_or_nothing(
    ratio: float | None, text: str
) -> None:
    assert formatting.percent(ratio) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.25, "250 ms"),
        (12, "12 s"),
        (59.96, "1 min"),
        (7384, "2 h 3 min"),
        (3600, "1 h"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(value: float | None, text: str) -> None:
    assert formatting.seconds(value) == text


def test_units_are_always_there() -> None:
    for say in ("rate", "milliseconds", "whole_seconds", "size", "size_rate", "count"):
        assert getattr(formatting, say)(None) == "–"
    assert formatting.rate(12.5) == "12.5/s"
    assert formatting.milliseconds(1.335) == "1.33 ms"
    assert formatting.milliseconds(1480) == "1.48 s"
    assert formatting.whole_seconds(0.4) == "0 s"
    sizes = {0: "0 B", 999: "999 B", 1500: "1.5 kB", 2.5e6: "2.5 MB"}
    assert {each: formatting.size(each) for each in sizes} == sizes
    assert formatting.size_rate(1500) == "1.5 kB/s"


def test_a_clock_has_the_date_only_on_another_day() -> None:
    noon = time.mktime((2026, 3, 4, 12, 0, 5, 0, 0, -1))
    assert formatting.clock(noon, noon) == "12:00:05"
    assert formatting.clock(noon + 0.25, noon, exact=True) == "12:00:05.250"
    assert formatting.clock(noon, noon + 200_000) == "2026-03-04 12:00:05"
    assert formatting.clock(None, noon) == "–"
    assert formatting.clock(1e300, noon) == "–"


@pytest.mark.parametrize(
    ("status", "grpc", "text"),
    [
        (200, None, "200 OK"),
        (503, None, "503 Unavailable"),
        (299, None, "299"),
        (0, None, "aborted"),
        (200, 14, "gRPC 14 unavailable"),
        (200, 99, "gRPC 99"),
        (503, 14, "503 Unavailable, gRPC 14 unavailable"),
    ],
)
def test_a_status_is_a_word(status: int, grpc: int | None, text: str) -> None:
    assert formatting.call_status(status, grpc) == text


DOCUMENT = {"a": {"n": 1.5, "t": "x", "l": [{"k": 1}, 2, "s", None], "f": True}, "n": 10**400}


def test_what_a_document_has_is_read() -> None:
    assert document.number(DOCUMENT, "a", "n") == 1.5
    assert document.text(DOCUMENT, "a", "t") == "x"
    assert document.text(DOCUMENT, "a", "n") == "1.5"
    assert document.flag(DOCUMENT, "a", "f")
    assert document.objects(DOCUMENT, "a", "l") == [{"k": 1}]
    assert document.texts(DOCUMENT, "a", "l") == ["s"]
    assert document.numbers(DOCUMENT, "a", "l") == [None, 2.0, None, None]
    assert document.by_name({"r": {"a": 2, "b": 0, "c": "x"}}, "r") == {"a": 2.0}
    assert [document.count({"x": each}, "x") for each in (1.5, -3, True)] == [1, 0, 0]


@pytest.mark.parametrize("path", [("x",), ("a", "x"), ("a", "t", "x"), ("a", "l", "x"), ("n",)])
@pytest.mark.parametrize("given", [DOCUMENT, None, [], "text", {"a": None}])
def test_what_a_document_does_not_have_is_empty(given: object, path: tuple[str, ...]) -> None:
    assert document.number(given, *path) is None
    assert document.count(given, *path) == 0
    assert document.objects(given, *path) == []
    assert document.by_name(given, *path) == {}
    assert not document.flag(given, *path)


def test_a_chart_shows_heights_gaps_and_zeros() -> None:
    assert sparkline([0, 4, 8, None, 0.001]) == ["▁▄█ ▂"]
    assert sparkline([]) == [""]
    assert sparkline([0, 0]) == ["▁▁"]
    assert sparkline([0, 1, 2, 3], 2) == ["  ▃█", "▁▅██"]
    assert [sparkline([each], 1, top=2) for each in (1, 4)] == [["▄"], ["█"]]


def test_many_points_are_squeezed_to_the_highest_of_each_span() -> None:
    assert squeeze([1, 9, 2, None, None, None, 3, 4], 8, 1, 4) == ([9, 2, 4], 3)
    assert squeeze([1, 2, 3], 3, 1, 10) == ([1, 2, 3], 1)
    assert squeeze([1, 2], 3, 1, 0) == squeeze([1, 2], 3, 0, 1) == ([], 1)
    assert squeeze([None, None, None], 3, 1, 2) == ([None, None], 2)


@pytest.mark.parametrize("width", [1, 34, 299])
def test_spans_stand_still_while_points_come(width: int) -> None:
    series = [float(at % 17) for at in range(400)]
    for end in range(300, 400):
        points, _ = squeeze(series[end - 300 : end], end - 1, 1, width)
        later, _ = squeeze(series[end - 299 : end + 1], end, 1, width)
        assert len(points) <= width
        # The last span grows, and the first one loses points; all between are as before.
        between = points[1:-1]
        assert between in (later[1 : 1 + len(between)], later[0 : len(between)])
