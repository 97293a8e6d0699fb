"""How much generated input tests try, and for how long fuzz tests search.

TENSORGATE_TEST_SCALE in the environment is the share of a full run. TENSORGATE_FUZZ_SECONDS is the
time of each fuzz test, whatever the scale. TENSORGATE_FAILING_RUN is the run of a line that fails,
where single lines of the gateway fail: the first, if it is not set.
"""

from __future__ import annotations

import os

SCALE = float(os.environ.get("TENSORGATE_TEST_SCALE", "0.1"))
FAILING_RUN = int(os.environ.get("TENSORGATE_FAILING_RUN", "1"))


def scaled(count: int) -> int:
    """Return the number of examples to try, of those that a full run tries."""
    return max(1, round(count * SCALE))


def fuzz_seconds(full: float) -> float:
    """Return the seconds that a fuzz test may take, of those that it takes in a full run."""
    return float(os.environ.get("TENSORGATE_FUZZ_SECONDS", full * SCALE))
