"""An event loop's clock and timers, in a test's hands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Timer:
    """A call to come."""

    when: float
    callback: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        """Never make it."""
        self.cancelled = True


@dataclass
class Clock:
    """What an event loop is to those who wait; its time passes when the test says so."""

    now: float = 100.0
    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        """Give the time."""
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Set a timer."""
        self.timers.append(Timer(when, callback))
        return self.timers[-1]

    @property
    def pending(self) -> list[Timer]:
        """Give the timers that are still to go off."""
        return [timer for timer in self.timers if not timer.cancelled]

    def advance(self, seconds: float) -> None:
        """Let time pass, and the timers go off that are due at its end."""
        self.now += seconds
        for timer in self.pending:
            if timer.when <= self.now:
                timer.cancel()
                timer.callback()
