"""A fake clock with timers, instead of an event loop's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Timer:
    """A scheduled callback."""

    when: float
    callback: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        """Cancel the callback."""
        self.cancelled = True


@dataclass(eq=False)
class Clock:
    """Clock and timers of an event loop; time passes only by ``advance``."""

    now: float = 100.0
    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        """Return the time."""
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Set a timer."""
        self.timers.append(Timer(when, callback))
        return self.timers[-1]

    @property
    def pending(self) -> list[Timer]:
        """Return the timers that are still to go off."""
        return [timer for timer in self.timers if not timer.cancelled]

    def advance(self, seconds: float) -> None:
        """Let time pass, and run the callbacks that are due."""
        self.now += seconds
        for timer in self.pending:
            if timer.when <= self.now:
                timer.cancel()
                timer.callback()
