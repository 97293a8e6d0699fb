"""How long each fuzz test may take."""

from __future__ import annotations

import os

VARIABLE = "TENSORGATE_FUZZ_SECONDS"


def seconds(default: float) -> float:
    """Return the seconds that each fuzz test may take: the environment's, or else the default."""
    return float(os.environ.get(VARIABLE, default))
