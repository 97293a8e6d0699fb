"""Charts of blocks."""

import pytest

from gateway.top.sparkline import sparkline, squeeze


def test_a_chart_shows_heights_gaps_and_zeros() -> None:
    assert sparkline([0, 4, 8, None, 0.001]) == ["▁▄█ ▂"]
    assert sparkline([]) == [""]
    assert sparkline([0, 0]) == ["▁▁"]
    assert sparkline([None]) == [" "]


def test_a_high_chart_has_several_rows() -> None:
    assert sparkline([0, 1, 2, 3], 2) == ["  ▃█", "▁▅██"]


def test_a_chart_with_a_given_top_leaves_room() -> None:
    assert sparkline([1], 1, top=2) == ["▄"]
    assert sparkline([4], 1, top=2) == ["█"]


def test_many_points_are_squeezed_to_the_highest_of_each_span() -> None:
    points, span = squeeze([1, 9, 2, None, None, None, 3, 4], 8, 1, 4)
    assert span == 3
    assert points == [9, 2, 4]
    assert squeeze([1, 2, 3], 3, 1, 10) == ([1, 2, 3], 1)
    assert squeeze([1, 2], 3, 1, 0) == ([], 1)
    assert squeeze([1, 2], 3, 0, 1) == ([], 1)
    assert squeeze([None, None, None], 3, 1, 2) == ([None, None], 2)


@pytest.mark.parametrize("width", [1, 7, 34, 160, 299])
def test_spans_stand_still_while_points_come(width: int) -> None:
    series = [float(at % 17) for at in range(400)]
    for end in range(300, 400):
        points, _ = squeeze(series[end - 300 : end], end - 1, 1, width)
        later, _ = squeeze(series[end - 299 : end + 1], end, 1, width)
        assert len(points) <= width
        # The last span grows, and the first one loses points; all between are as before.
        between = points[1:-1]
        assert between in (later[1 : 1 + len(between)], later[0 : len(between)])
