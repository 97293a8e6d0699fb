"""What goes on beside all else."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

_log = logging.getLogger("tensorgate")


class BackgroundTask(ABC):
    """Runs in a task of its own while its context is open."""

    @abstractmethod
    async def run(self) -> None:
        """Do what it is for, until cancelled."""

    async def __aenter__(self) -> Self:
        """Begin."""
        self._task = asyncio.create_task(self.run())
        self._task.add_done_callback(_log_fault)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it, and wait until it has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _log_fault(task: asyncio.Task[None]) -> None:
    """Log what ended a task that was to go on: nobody waits for it before the end."""
    if not task.cancelled() and (fault := task.exception()) is not None:
        _log.error("a background task failed and does not go on", exc_info=fault)
