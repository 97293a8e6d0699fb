"""Probes the members and the names of an upstream again and again."""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)

_RESTART_DELAY = 1.0
"""Seconds after which a target is probed again if the probe itself has failed."""

_log = logging.getLogger("tensorgate.upstream")


@dataclass(eq=False, kw_only=True)
class Watch(ABC, Generic[_T]):
    """Probes each target again and again: after the pause that its probe returns, or once woken.

    The first pause is a ``random`` part of that, in [0, 1). So gateways that start together do not
    ask their servers at the same time forever.
    """

    random: Callable[[], float] = random.random
    wakes: dict[_T, asyncio.Event] = field(default_factory=dict)
    """The targets, each with what ends its pause."""

    @property
    def wake_delay(self) -> float:
        """Return the seconds from when a target is woken until it is probed."""
        return 0.0

    def add(self, target: _T) -> None:
        """Count a target, for which ``run`` is called soon."""
        self.wakes[target] = asyncio.Event()

    def remove(self, target: _T) -> None:
        """Count a target no more, whose ``run`` is cancelled."""
        self.wakes.pop(target, None)

    def wake(self, target: _T) -> None:
        """Probe a target soon, and not after its pause."""
        if (event := self.wakes.get(target)) is not None:
            event.set()

    async def run(self, target: _T) -> None:
        """Probe a target until cancelled."""
        wake, share = self.wakes[target], self.random()
        while True:
            wake.clear()  # who wakes it from now on needs another probe
            try:
                pause, share = share * await self.probe(target), 1.0
            except Exception:
                # An error of our own is logged. A target that is never probed again would stay as
                # it is for good.
                _log.exception("a background task of an upstream failed and starts again")
                pause = _RESTART_DELAY
            try:
                async with asyncio.timeout(pause):
                    await wake.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(self.wake_delay)

    @abstractmethod
    async def probe(self, target: _T) -> float:
        """Probe a target; return the seconds until the next time."""
