"""Has threads convert parts of large tensors; they run C code without the interpreter's lock."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from gateway.codec.native import DATATYPE_CODES, ThreadPool
from gateway.codec.offload_interface import OffloadFuture
from gateway.codec.policies import NONFINITE_CODES, Nonfinite
from gateway.protocol.datatypes import Datatype

if TYPE_CHECKING:
    from gateway.codec.native import _native

_MIN_JOB_SIZE = 16 * 1024
"""Bytes that are worth another thread, which takes up to 0.05 ms to wake up."""
MAX_JOB_SIZE = 512 * 1024
"""Bytes of the largest job: others must not wait for long."""
_QUEUED_PER_THREAD = 8
"""Jobs that wait for a thread: the caller converts more itself. Until then it goes on reading, as
else the threads would wait; whoever waits for a result does jobs of the queue."""
_READ_SIZE = 4096
_RESTART_DELAY = 10.0
"""Seconds until threads that could not be started are tried again."""
_POLL_INTERVAL = 0.001
"""Seconds between looks at a conversion that goes on after ``close``."""

_log = logging.getLogger("tensorgate.offload")


class OffloadThreads:
    """Has ``count`` threads convert; they start with the first job.

    They get no job if they are busy. ``on_job`` is called for each job that is large enough:
    whether a thread gets it. Waiting calls do what no thread has begun.
    """

    def __init__(self, count: int, on_job: Callable[[bool], None] = lambda _: None) -> None:
        self.count = count
        self._on_job = on_job
        self._loop = asyncio.get_running_loop()
        self._pool: _native.ThreadPool | None = None
        self._notified = -1
        self._waiters: dict[_native.Conversion, asyncio.Future[None]] = {}
        self._has_helped = False
        """Whether a waiting call has done a job in this turn of the event loop."""
        self._is_closed = False
        self._next_start = 0.0

    def decode(
        self, text: memoryview, datatype: Datatype, open_before: int, open_after: int
    ) -> OffloadFuture | None:
        """Decode a part of an array; see Offloader."""
        code = DATATYPE_CODES.get(datatype.name)
        if code is None or (pool := self._free_pool(len(text))) is None:
            return None
        return _OffloadedJob(self, pool.decode_numbers(text, code, open_before, open_after))

    def encode(
        self, data: bytes | memoryview, datatype: Datatype, nonfinite: Nonfinite, continued: bool
    ) -> OffloadFuture | None:
        """Encode elements; see Offloader."""
        code = DATATYPE_CODES.get(datatype.name)
        if code is None or (pool := self._free_pool(len(data))) is None:
            return None
        policy = NONFINITE_CODES[nonfinite]
        return _OffloadedJob(self, pool.encode_numbers(data, code, policy, continued))

    def _free_pool(self, size: int) -> _native.ThreadPool | None:
        """Return the pool for a job of this size; None if it is done sooner in this thread."""
        if not _MIN_JOB_SIZE <= size <= MAX_JOB_SIZE:
            return None
        pool = self._pool or self._start()
        if pool is None:
            return None
        is_busy = pool.queued >= _QUEUED_PER_THREAD * self.count
        self._on_job(not is_busy)
        return None if is_busy else pool

    def close(self) -> None:
        """End the threads; they finish what they are doing."""
        self._is_closed = True
        if self._pool is not None:
            self._loop.remove_reader(self._notified)
            os.close(self._notified)
            self._pool = None
            self._wake(list(self._waiters.values()))

    async def wait_for(self, conversion: _native.Conversion) -> None:
        """Wait for a conversion, and do others meanwhile: one in a turn of the event loop."""
        while not conversion.done:
            if self._pool is None:
                await asyncio.sleep(_POLL_INTERVAL)
            elif self._pool.queued:
                if not self._has_helped:
                    self.help()
                await asyncio.sleep(0)
            elif conversion.notify():
                await self._waiter_of(conversion)

    def help(self) -> bool:
        """Do the newest conversion that no thread has begun; return whether there was any."""
        if self._pool is None or not self._pool.run_newest():
            return False
        if not self._has_helped:
            self._has_helped = True
            self._loop.call_soon(self._begin_turn)
        return True

    def call_when_done(self, conversion: _native.Conversion, callback: Callable[[], None]) -> None:
        """Call back once a conversion is done; after ``close`` it is to be asked again."""
        if self._pool is None:
            self._loop.call_later(_POLL_INTERVAL, callback)
        elif not conversion.notify():
            self._loop.call_soon(callback)
        else:
            self._waiter_of(conversion).add_done_callback(lambda _: callback())

    def _waiter_of(self, conversion: _native.Conversion) -> asyncio.Future[None]:
        """Return what is done once a conversion is, or the pool is closed."""
        waiter = self._waiters[conversion] = self._loop.create_future()
        waiter.add_done_callback(lambda _: self._waiters.pop(conversion, None))
        return waiter

    def _start(self) -> _native.ThreadPool | None:
        if self._is_closed or ThreadPool is None:
            return None
        now = self._loop.time()
        if now < self._next_start:
            return None
        try:
            self._notified, self._pool = _start_pool(ThreadPool, self.count)
        except OSError as error:
            _log.warning("no threads for large tensors, for %g s: %s", _RESTART_DELAY, error)
            self._next_start = now + _RESTART_DELAY
            return None
        self._loop.add_reader(self._notified, self._on_done)
        return self._pool

    def _begin_turn(self) -> None:
        self._has_helped = False

    def _on_done(self) -> None:
        """Wake the calls whose conversions are done."""
        with suppress(BlockingIOError):
            os.read(self._notified, _READ_SIZE)
        self._wake([waiter for each, waiter in self._waiters.items() if each.done])

    def _wake(self, waiters: list[asyncio.Future[None]]) -> None:
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _start_pool(
    make: Callable[[int, int], _native.ThreadPool], count: int
) -> tuple[int, _native.ThreadPool]:
    """Return a descriptor that is readable after each notification, and a pool; raises OSError."""
    ours, theirs = os.pipe()
    try:
        os.set_blocking(ours, False)
        os.set_blocking(theirs, False)
        return ours, make(count, theirs)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


class _OffloadedJob:
    """A job that waits for a thread, is in progress, or is done."""

    def __init__(self, threads: OffloadThreads, conversion: _native.Conversion) -> None:
        self._threads = threads
        self._conversion = conversion

    @property
    def done(self) -> bool:
        """Tell whether the result is known."""
        return self._conversion.done

    def take_result(self) -> bytes | None:
        """Return the converted data; see OffloadFuture."""
        return self._conversion.take_result()

    async def wait(self) -> None:
        """Wait until it is done."""
        await self._threads.wait_for(self._conversion)

    def help(self) -> bool:
        """Convert what no thread has begun; see OffloadFuture."""
        return not self._conversion.done and self._threads.help()

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Call back once it may be done."""
        self._threads.call_when_done(self._conversion, callback)
