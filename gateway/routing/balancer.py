"""Which endpoint of an upstream takes the next exchange."""

from __future__ import annotations

from collections.abc import Sequence


def least_outstanding(
    outstanding: Sequence[int], turn: int, allowed: Sequence[int] | None = None
) -> int:
    """Give the index of the endpoint with the fewest exchanges under way.

    ``turn`` counts up with every call: endpoints that are equally busy take turns. Where
    ``allowed`` is given, it is one of these indices, of which there is one at least.
    """
    indices = range(len(outstanding)) if allowed is None else allowed
    count = len(indices)
    in_turn = (indices[i % count] for i in range(turn, turn + count))
    return min(in_turn, key=outstanding.__getitem__)
