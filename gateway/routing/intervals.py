"""When something is done again that is done every so often."""

from __future__ import annotations

from collections.abc import Iterator


def pauses(every: float, random: float) -> Iterator[float]:
    """Yield the seconds between one time and the next.

    The first pause is the part of ``every`` that ``random`` in [0, 1) tells: gateways that start
    together, and ask their servers at once, do not go on asking together.
    """
    yield every * random
    while True:
        yield every
