"""How bytes arrive: whole, one by one, and cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st

LAW = settings(max_examples=150)

PLACES = st.lists(st.integers(0, 400), max_size=8)
"""Where to cut; what lies behind the end, at the end."""


def bytewise(data: bytes) -> list[bytes]:
    """Cut behind every byte."""
    return [data[i : i + 1] for i in range(len(data))]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut at these places; pieces may be empty."""
    ends = sorted(min(place, len(data)) for place in places)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def all_splits(data: bytes) -> Iterator[list[bytes]]:
    """Give the data whole, byte by byte, and in two at every place."""
    yield [data]
    yield bytewise(data)
    for place in range(1, len(data)):
        yield cut(data, [place])
