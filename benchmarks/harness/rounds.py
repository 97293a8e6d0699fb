"""Rounds of what is compared, in which the machine was there for it.

The host of a virtual machine may give others a fifth of the time that is wanted, as the kernel can
tell. What takes two cores at once suffers from that more than what takes one; so rounds that were
disturbed are gone again, all ways in each, as long as that is not without end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from benchmarks.harness.proc_stats import StolenTime

_QUIET = 0.02
"""The share of the time that others may have in a round that counts."""
_MOST_TIMES = 2
"""How many times as many rounds as are wanted are gone at most."""

Way = TypeVar("Way")
T = TypeVar("T")


def go_rounds(
    rounds: int, ways: Mapping[Way, Callable[[], T]], *, short: bool = False
) -> dict[Way, list[T]]:
    """Go all ways in each of so many rounds; give what came of each way.

    Every second round goes backwards, so that no way always follows the same one. Goes more rounds
    where others had more than 2 % of the time, up to twice as many, and takes those in which they
    had the least; but of ``short`` ones, below some 0.1 s, the kernel cannot tell.
    """
    gone: list[tuple[float, dict[Way, T]]] = []
    quiet = 0
    while quiet < rounds and len(gone) < _MOST_TIMES * rounds:
        order = list(ways)[:: 1 if len(gone) % 2 else -1]
        stolen = None if short else StolenTime()
        taken = {way: ways[way]() for way in order}
        share = 0.0 if stolen is None else stolen.share()
        quiet += share <= _QUIET
        gone.append((share, taken))
    gone.sort(key=lambda each: each[0])
    return {way: [taken[way] for _, taken in gone[:rounds]] for way in ways}


def repeated(rounds: int, way: Callable[[], T]) -> list[T]:
    """Go one way alone, in so many rounds as those above; give what came of it."""
    return go_rounds(rounds, {"": way})[""]
