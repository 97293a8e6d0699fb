"""Tasks that run in the background while a context is open."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Self

_log = logging.getLogger("tensorgate")


class BackgroundTask(ABC):
    """Runs ``run`` in a task of its own while its context is open."""

    @abstractmethod
    async def run(self) -> None:
        """Run until cancelled."""

    async def __aenter__(self) -> Self:
        """Start the task."""
        self._task = asyncio.create_task(self.run(), name=type(self).__name__)
        self._task.add_done_callback(_log_error)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the task, and wait for its end."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _log_error(task: asyncio.Task[None]) -> None:
    """Log an unexpected end of the task: nobody awaits it while it should run."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("background task %s failed and stopped", task.get_name(), exc_info=error)
