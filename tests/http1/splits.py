"""Splits of bytes: whole, byte by byte, and at given places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import settings
from hypothesis import strategies as st

from tests.support.scale import scaled

LAW = settings(max_examples=scaled(150))

PLACES = st.lists(st.integers(0, 400), max_size=8)
"""Places to split at; those after the end count as the end."""


def bytewise(data: bytes) -> list[bytes]:
    """Split into single bytes."""
    return [data[i : i + 1] for i in range(len(data))]


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """Split at these places; pieces may be empty."""
    ends = sorted(min(place, len(data)) for place in places)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def all_splits(data: bytes) -> Iterator[list[bytes]]:
    """Yield the data whole, byte by byte, and split in two at every place."""
    yield [data]
    yield bytewise(data)
    for place in range(1, len(data)):
        yield cut(data, [place])
