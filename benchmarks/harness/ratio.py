"""Ratios of what was measured in the same rounds.

A machine that others use too may change its speed by half within seconds. What two ways had in one
round they had side by side, so they are compared in each; the middle of that is the result.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of a ratio over some rounds, and the quartiles, between which half of them lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ones: Sequence[float], others: Sequence[float]) -> Self:
        """Compare two ways, round by round; there must be two rounds at least."""
        ratios = [one / other for one, other in zip(ones, others, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(median, low, high)

    def shown(self, digits: int, what: str) -> str:
        """Write it for the table: what is so many times what, with so many decimals."""
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f} × {what} ({low} to {high})"
