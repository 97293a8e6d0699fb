"""How steady the machine is: others that share it may take half of its speed, and give it back.

What is compared is compared side by side, but what takes two cores at once suffers more from that
than what takes one.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.harness.proc_stats import StolenTime
from benchmarks.report import Row, milliseconds

_STEPS = 300_000


class Steadiness:
    """Does the same work of one core at moments of a run, and notes the seconds that it takes."""

    def __init__(self) -> None:
        self._taken: list[float] = []
        self._stolen = StolenTime()

    def note(self) -> None:
        """Do the work."""
        began = time.perf_counter()
        total = 0
        for step in range(_STEPS):
            total += step
        self._taken.append(time.perf_counter() - began)

    def row(self) -> Row:
        """Tell how much the times differ, and what went to others; there must be one at least."""
        least, most = min(self._taken), max(self._taken)
        return Row(
            f"the same loop of Python, at {len(self._taken)} moments of the run",
            result=f"{milliseconds(least)} to {milliseconds(most)}, "
            f"{milliseconds(statistics.median(self._taken))} in the middle; "
            f"the host gave others {self._stolen.share():.1%} of the time that was wanted",
        )
