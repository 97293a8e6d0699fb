"""Draw how a number changed as a row of blocks, or as a chart of several rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = 8

Points = Sequence[float | None]


def sparkline(points: Points, height: int = 1, top: float | None = None) -> list[str]:
    """Return the rows of a chart, the highest first; a point that is not known is a gap.

    ``top`` is the value of the full height: without it, the highest point.
    """
    highest = max((each for each in points if each is not None), default=0.0)
    full = max(highest, top or 0.0)
    eighths = [_height(each, full, height * _EIGHTHS) for each in points]
    return [
        "".join(_BLOCKS[max(0, min(_EIGHTHS, each - row * _EIGHTHS))] for each in eighths)
        for row in reversed(range(height))
    ]


def _height(value: float | None, full: float, most: int) -> int:
    """Return a height in eighths; what is above 0 is higher than 0, which is one eighth."""
    if value is None:
        return 0
    if value <= 0 or full <= 0:
        return 1
    return max(2, min(most, round(value / full * most)))


def squeeze(points: Points, end: float, step: float, width: int) -> tuple[list[float | None], int]:
    """Return the highest points of equal spans, at most ``width``, and how many points a span has.

    The spans stand still while new points come: they begin at multiples of their length.
    """
    if not points or width < 1 or step <= 0:
        return [], 1
    span = max(1, math.ceil((len(points) + 1) / width)) if len(points) > width else 1
    if span == 1:
        return list(points), 1
    last = int(end / step)
    spans: dict[int, float | None] = {}
    for position, value in enumerate(points):
        key = (last - len(points) + 1 + position) // span
        known = spans.get(key)
        spans[key] = known if value is None or (known or 0) > value else value
    return list(spans.values())[-width:], span
