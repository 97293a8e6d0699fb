"""The worker's side of its offload process: starts it, sends jobs, works without it if it fails."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from gateway.codec.elements.run_job import run_job
from gateway.codec.offload_interface import ConversionJob, Offloader, OffloadFuture
from gateway.offload.slots import (
    DONE,
    MAX_JOB_SIZE,
    MESSAGE,
    SLOT_COUNT,
    MessageReader,
    SharedSlots,
    create_memory,
    encode_job,
)

_MIN_JOB_SIZE = 16 * 1024
"""Bytes that are worth sending: less is converted sooner than sent."""
_JOB_TIMEOUT = 10.0
"""Seconds for a job, which takes less than ten milliseconds."""
_RESTART_DELAY = 10.0
"""Seconds between two starts at least."""

_log = logging.getLogger("tensorgate.offload")


class OffloadProcess(Offloader):
    """Has a process convert tensors; it starts when there is a first job.

    ``submit`` returns None while the process is not running, or is busy. Jobs that it has not done
    when it dies, or takes too long, count as not done. ``on_job`` is called for each job that is
    large enough: whether the process got it.
    """

    def __init__(self, on_job: Callable[[bool], None] = lambda _: None) -> None:
        self._on_job = on_job
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._running: asyncio.Task[None] | None = None
        self._next_start = 0.0

    def submit(self, job: ConversionJob, *data: bytes | memoryview) -> OffloadFuture | None:
        """Submit a job; None if it is done sooner in this process."""
        if not _MIN_JOB_SIZE <= sum(map(len, data)) <= MAX_JOB_SIZE:
            return None
        submitted = None
        if self._connection is None:
            self._start()
        else:
            submitted = self._connection.send(job, data)
        self._on_job(submitted is not None)
        return submitted

    async def close(self) -> None:
        """Stop the process."""
        self._next_start = float("inf")
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _start(self) -> None:
        now = self._loop.time()
        if now < self._next_start or (self._running is not None and not self._running.done()):
            return
        self._next_start = now + _RESTART_DELAY
        self._running = self._loop.create_task(self._run())

    async def _run(self) -> None:
        ours, theirs = socket.socketpair()
        memory = create_memory()
        with theirs, os.fdopen(memory):
            slots = SharedSlots(memory)
            process = subprocess.Popen(  # noqa: ASYNC220, S603  # our own, and it starts quickly
                [sys.executable, "-m", "gateway.offload", str(theirs.fileno()), str(memory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), memory],
            )
        connection = None
        try:
            _, connection = await self._loop.create_connection(
                lambda: _Connection(slots), sock=ours
            )
            self._connection = connection
            await connection.lost
            _log.warning(
                "the offload process %d ended; it will be restarted on demand", process.pid
            )
        finally:
            self._connection = None
            if connection is None:
                ours.close()
            else:
                connection.transport.abort()
            process.kill()
            # It dies at once, and must not stay as a zombie.
            await asyncio.shield(self._loop.run_in_executor(None, process.wait))


@dataclass(eq=False)
class _SubmittedJob(OffloadFuture):
    """A job in a slot."""

    connection: _Connection
    job: ConversionJob
    slot: int
    size: int

    def finish(self, result: bytes | memoryview | None) -> None:
        self.done = True
        self.result = result

    async def wait(self) -> None:
        # The waiting call has nothing else to do, and the offload process may share its core with
        # others. So this process does the last jobs, while the other one does the first.
        for job in self.connection.pending_newest_first():
            if self.done:
                return
            if not job.done:
                self.connection.run_locally(job)
                await asyncio.sleep(0)


class _Connection(asyncio.Protocol):
    """The connection to the offload process."""

    transport: asyncio.Transport

    def __init__(self, slots: SharedSlots) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = MessageReader()
        self._slots = slots
        self._free_slots = list(range(SLOT_COUNT))
        self._jobs: deque[_SubmittedJob] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_ready = False
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def send(
        self, job: ConversionJob, data: tuple[bytes | memoryview, ...]
    ) -> _SubmittedJob | None:
        """Send a job; None if all slots are taken."""
        if not self._free_slots or not self._is_ready or self.transport.is_closing():
            return None
        slot = self._free_slots.pop()
        size = self._slots.write_job(slot, data)
        submitted = _SubmittedJob(self, job, slot, size)
        self._jobs.append(submitted)
        self.transport.write(MESSAGE.pack(encode_job(job), slot, size))
        if self._timer is None:
            self._timer = self._loop.call_later(_JOB_TIMEOUT, self._check, submitted)
        return submitted

    def pending_newest_first(self) -> list[_SubmittedJob]:
        """Return the jobs without a reply, the last one first."""
        return list(reversed(self._jobs))

    def run_locally(self, submitted: _SubmittedJob) -> None:
        """Do a job in this process; the offload process need not begin with it any more."""
        self._slots.cancel(submitted.slot)
        data = self._slots.job_data(submitted.slot, submitted.size)
        submitted.finish(run_job(submitted.job, data))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take results, which come in the order of the jobs."""
        messages = self._reader.feed(data)
        if messages and not self._is_ready:
            self._is_ready = True
            del messages[0]
        for code, slot, size in messages:
            job = self._jobs.popleft()
            if not job.done:
                job.finish(self._slots.copy_result(slot, size) if code == DONE else None)
            self._free_slots.append(slot)

    def connection_lost(self, exc: Exception | None) -> None:
        """Finish all jobs as not done."""
        if self._timer is not None:
            self._timer.cancel()
        while self._jobs:
            job = self._jobs.popleft()
            if not job.done:
                job.finish(None)
        if not self.lost.done():
            self.lost.set_result(None)

    def _check(self, submitted: _SubmittedJob) -> None:
        """Abort if the process has not replied to a job in time."""
        self._timer = None
        if submitted in self._jobs:
            _log.warning(
                "the offload process did not reply to a job within %g s: stopped", _JOB_TIMEOUT
            )
            self.transport.abort()
        elif self._jobs:
            self._timer = self._loop.call_later(_JOB_TIMEOUT, self._check, self._jobs[-1])
