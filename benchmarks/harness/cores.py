"""Which core the measured process has to itself, and which ones all else shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """The cores of this machine, divided: one for what is measured, the others for the rest."""

    measured: frozenset[int]
    others: frozenset[int]

    @property
    def note(self) -> str:
        """What to say of it in the table: nothing, unless there is just one core for all."""
        return " (a single core for all)" if self.measured == self.others else ""


def divided() -> Division:
    """Divide the cores that this process may use; a single one is shared."""
    first, *others = sorted(os.sched_getaffinity(0))
    return Division(frozenset([first]), frozenset(others or [first]))


@contextmanager
def staying_on(cores: frozenset[int]) -> Iterator[None]:
    """Keep this thread, and what it starts meanwhile, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
