"""What goes on beside all else."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Background(ABC):
    """Runs in a task of its own while its context is open."""

    @abstractmethod
    async def run(self) -> None:
        """Do what it is for, until cancelled."""

    async def __aenter__(self) -> Self:
        """Begin."""
        self._task = asyncio.create_task(self.run())
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
