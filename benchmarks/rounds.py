"""Rounds in which the machine was there for what is measured.

The host of a virtual machine may give others a fifth of the time that is wanted, as the kernel can
tell. What takes two cores at once suffers from that more than what takes one; so rounds that were
disturbed are gone again, all ways in each, as long as that is not without end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from benchmarks.usage import stolen_and_wanted, stolen_share

_QUIET = 0.02
"""The share of the time that others may have in a round that counts."""
_MOST_TIMES = 2
"""How many times as many rounds as are wanted are gone at most."""

T = TypeVar("T")


def least_disturbed(rounds: int, go: Callable[[int], T]) -> list[T]:
    """Go so many rounds; give what came of them.

    Goes more of them where others had more than 2 % of the time, up to twice as many, and gives
    those in which others had the least. ``go`` takes the number of the round.
    """
    gone: list[tuple[float, T]] = []
    quiet = 0
    while quiet < rounds and len(gone) < _MOST_TIMES * rounds:
        before = stolen_and_wanted()
        result = go(len(gone))
        share = stolen_share(before, stolen_and_wanted())
        quiet += share <= _QUIET
        gone.append((share, result))
    gone.sort(key=lambda each: each[0])
    return [result for _, result in gone[:rounds]]
