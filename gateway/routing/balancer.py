"""Which endpoint of an upstream takes the next exchange."""

from __future__ import annotations

from collections.abc import Sequence


def least_outstanding(outstanding: Sequence[int], turn: int) -> int:
    """Give the index of the endpoint with the fewest exchanges under way.

    ``turn`` counts up with every call: endpoints that are equally busy take turns.
    """
    count = len(outstanding)
    in_turn = (i % count for i in range(turn, turn + count))
    return min(in_turn, key=outstanding.__getitem__)
