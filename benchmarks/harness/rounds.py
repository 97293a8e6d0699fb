"""Runs what is compared in rounds, and gives the ratios of the rounds.

The host of a virtual machine may take away a fifth of the CPU time, which the kernel reports as
steal. Work on two cores suffers more from it than work on one. So a disturbed round is repeated,
with everything in it, up to a limit.

A shared machine may also change its speed by half within seconds. So measurements are compared
within each round, where they ran side by side. The result is the median of those ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from benchmarks.harness.proc_stats import CpuSteal

_MAX_STEAL = 0.02
"""The CPU steal above which a round is disturbed."""
_MAX_REPEATS = 2
"""How many times the requested number of rounds may run."""

Name = TypeVar("Name")
T = TypeVar("T")


def run_rounds(
    rounds: int, jobs: Mapping[Name, Callable[[], T]], *, short: bool = False
) -> dict[Name, list[T]]:
    """Run all jobs in each round, and return the results of each job.

    Every second round runs backwards, so that no job always follows the same one. Disturbed rounds
    are repeated, up to twice the number of rounds; the rounds with the least CPU steal count. The
    kernel's clock is too coarse for the steal of ``short`` rounds, below some 0.1 s.
    """
    finished: list[tuple[float, dict[Name, T]]] = []
    undisturbed = 0
    while undisturbed < rounds and len(finished) < _MAX_REPEATS * rounds:
        order = list(jobs)[:: 1 if len(finished) % 2 else -1]
        steal = None if short else CpuSteal()
        results = {name: jobs[name]() for name in order}
        share = 0.0 if steal is None else steal.share()
        undisturbed += share <= _MAX_STEAL
        finished.append((share, results))
    finished.sort(key=lambda each: each[0])
    return {name: [results[name] for _, results in finished[:rounds]] for name in jobs}


def repeat(rounds: int, job: Callable[[], T]) -> list[T]:
    """Run one job in rounds, as ``run_rounds`` does, and return its results."""
    return run_rounds(rounds, {"": job})[""]


def difference(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of how much more one job took than another in the same round."""
    return statistics.median(one - other for one, other in zip(ones, others, strict=True))


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of a ratio over some rounds, with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ones: Sequence[float], others: Sequence[float]) -> Self:
        """Divide the results of two jobs round by round; it takes two rounds at least."""
        ratios = [one / other for one, other in zip(ones, others, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(median, low, high)

    def shown(self, digits: int, what: str) -> str:
        """Format the ratio for the table, with ``digits`` decimals."""
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f} × {what} ({low} to {high})"
