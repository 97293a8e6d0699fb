"""What conversion saves for a model in milliseconds, as an operator has measured it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

_MAX_MODELS = 1000
"""Models whose last measurement is kept."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The times of the same JSON call, converted and passed through untouched."""

    converted_ms: float
    untouched_ms: float
    elements: int
    """The elements of all tensors, in both directions."""
    at: float = field(default_factory=time.time)

    @property
    def saved_ms(self) -> float:
        """Return what conversion saved; negative if it took longer."""
        return self.untouched_ms - self.converted_ms

    def describe(self) -> dict[str, Any]:
        """Return the measurement as JSON."""
        return {
            "converted_ms": self.converted_ms,
            "untouched_ms": self.untouched_ms,
            "elements": self.elements,
            "at": self.at,
        }


class Savings:
    """The last measurement of each model."""

    def __init__(self) -> None:
        self._measurements: dict[str, Measurement] = {}

    def add(self, model: str, measurement: Measurement) -> None:
        """Keep a measurement; the oldest goes if there are too many."""
        self._measurements.pop(model, None)
        self._measurements[model] = measurement
        if len(self._measurements) > _MAX_MODELS:
            del self._measurements[next(iter(self._measurements))]

    def describe(self, model: str, converted_elements: float) -> dict[str, Any]:
        """Return the measurement of a model, and the estimate for all that was converted."""
        measured = self._measurements.get(model)
        if measured is None:
            return {"measured": None, "saved_ms_estimate": None}
        per_element = measured.saved_ms / max(1, measured.elements)
        return {
            "measured": measured.describe(),
            "saved_ms_estimate": per_element * converted_elements,
        }
