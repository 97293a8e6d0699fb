"""The pauses of periodic work."""

from __future__ import annotations

from collections.abc import Iterator


def jittered_intervals(interval: float, random: float) -> Iterator[float]:
    """Yield the seconds between one run and the next.

    The first pause is ``random`` in [0, 1) times the interval. So gateways that start together do
    not ask their servers at the same time forever.
    """
    yield interval * random
    while True:
        yield interval
