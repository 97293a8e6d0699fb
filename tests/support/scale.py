"""How much generated input tests try: TENSORGATE_TEST_SCALE in the environment, 1 for all of it."""

from __future__ import annotations

import os

SCALE = float(os.environ.get("TENSORGATE_TEST_SCALE", "0.4"))


def scaled(count: int) -> int:
    """Give the number of examples to try, of those that a full run tries."""
    return max(1, round(count * SCALE))
