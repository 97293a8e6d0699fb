"""Measures how much the speed of the machine varies during a run.

Other guests of the host may take half of the speed for a while. Work on two cores suffers more from
that than work on one, even where both are measured side by side.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.harness.proc_stats import CpuSteal
from benchmarks.report import Row, milliseconds

_STEPS = 300_000


class MachineSpeed:
    """Times the same single-core loop at several moments of a run."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._steal = CpuSteal()

    def sample(self) -> None:
        """Run the loop once."""
        began = time.perf_counter()
        total = 0
        for step in range(_STEPS):
            total += step
        self._times.append(time.perf_counter() - began)

    def row(self) -> Row:
        """Summarize the samples, of which there must be one, and the CPU steal."""
        minimum, maximum = min(self._times), max(self._times)
        return Row(
            f"the same loop of Python, at {len(self._times)} moments of the run",
            result=f"{milliseconds(minimum)} to {milliseconds(maximum)}, "
            f"{milliseconds(statistics.median(self._times))} in the middle; "
            f"CPU steal was {self._steal.share():.1%}",
        )
