"""Which settings are in use, and what became of newer ones."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Revision:
    """Tell of the settings in use; times are in seconds since the epoch."""

    loaded_at: float
    file: str | None = None
    number: int = 1
    """Counts the settings that were in use, these included."""
    last_failure: str | None = None
    """Why newer settings could not be used; None where these are the newest."""
    failed_at: float | None = None
    reloads: int = 0
    failures: int = 0
    """How often newer settings could not be used, since the start."""

    def reloaded(self, now: float) -> Revision:
        """Tell of settings that have taken the place of these."""
        return replace(
            self,
            loaded_at=now,
            number=self.number + 1,
            last_failure=None,
            failed_at=None,
            reloads=self.reloads + 1,
        )

    def failed(self, why: str, now: float) -> Revision:
        """Tell that these stay, and why."""
        return replace(self, last_failure=why, failed_at=now, failures=self.failures + 1)
