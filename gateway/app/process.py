"""What all processes of a gateway have: event loop, tasks, signals, log lines, memory."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Self, TypeVar

import uvloop

from gateway import __version__
from gateway.build_info import describe_build
from gateway.settings.schema import Settings
from gateway.system.memory import has_malloc_trim, resident_bytes, trim_malloc
from gateway.workers.signals import IGNORED_SIGNALS, log_ignored

_T = TypeVar("_T")

_INTERVAL = 10.0
"""Seconds between two looks at the memory."""
_IDLE_LOAD = 0.25
"""The share of a core below which a process counts as idle: trimming takes some 100 ms per GiB."""
_RESERVE = 64 * 2**20
"""Bytes beyond those at the start that it keeps."""

_log = logging.getLogger("tensorgate")


def run(main: Coroutine[None, None, _T]) -> _T:
    """Run a coroutine in an event loop of uvloop, and return what it returns."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def handle_signals(callback: Callable[[], None], *numbers: int) -> None:
    """Have the event loop call ``callback`` for some signals, and log those that are ignored."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, callback)
    for number in IGNORED_SIGNALS:
        loop.add_signal_handler(number, log_ignored, number)


def set_log_level(settings: Settings) -> None:
    """Log by the level of settings that are in use from now on."""
    logging.getLogger().setLevel(settings.log.level.upper())


def log_started(addresses: Sequence[str]) -> None:
    """Log what serves from now on, and where."""
    _log.info("Tensorgate %s, %s", __version__, describe_build())
    log_addresses(addresses)


def log_addresses(addresses: Sequence[str], before: Sequence[str] = ()) -> None:
    """Log the addresses that the gateway listens on now, and those that it has left."""
    for address in addresses:
        if address not in before:
            _log.info("listening on %s", address)
    for address in before:
        if address not in addresses:
            _log.info("no longer listening on %s", address)


def log_stopping(settings: Settings) -> None:
    """Log that no call is taken any more."""
    _log.info("stopping: calls in progress have at most %g s", settings.limits.drain_timeout)


def log_stopped(dropped: int) -> None:
    """Log the end, and how many calls were cut."""
    if dropped:
        _log.warning(
            "%d calls did not finish in time and were aborted (limits.drain_timeout)", dropped
        )
    _log.info("stopped")


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


class MallocTrim(BackgroundTask):
    """Calls malloc_trim(3) while its context is open.

    By itself, glibc gives back only what is free at the end of its heap. One small object there
    keeps the memory of hundreds of large requests.
    """

    async def run(self) -> None:
        """Trim when much memory is free and the process is idle."""
        if not has_malloc_trim():
            return
        enough = resident_bytes() + _RESERVE
        while True:
            used = time.process_time()
            await asyncio.sleep(_INTERVAL)
            is_idle = time.process_time() - used < _IDLE_LOAD * _INTERVAL
            with suppress(OSError):  # no descriptor is left to look at the memory
                if is_idle and resident_bytes() > enough:
                    # In a thread, so that only allocations wait for it.
                    await asyncio.to_thread(trim_malloc)
