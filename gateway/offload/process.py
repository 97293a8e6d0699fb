"""The gateway's side of its helper: starts it, sends it work, does without it when it fails."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from typing import cast

from gateway.codec.elements.offloaded_work import run_job
from gateway.codec.offload import ConversionJob, Offloader, OffloadFuture
from gateway.offload.slots import (
    DONE,
    MAX_WORK_SIZE,
    MESSAGE,
    SLOT_COUNT,
    MessageReader,
    SharedSlots,
    create_memory,
    work_code,
)

_SMALLEST = 16 * 1024
"""Bytes that are worth sending: less is converted sooner than sent."""
_PATIENCE = 10.0
"""Seconds for a piece of work, which takes less than one of their thousandths."""
_PAUSE = 10.0
"""Seconds between two starts at least."""

_log = logging.getLogger("tensorgate.helper")


class OffloadProcess(Offloader):
    """Has numbers converted by a process that starts when there is work for it.

    Where there is none, or it has enough to do, ``lend`` says so. What it has not done when it
    dies, or takes too long, counts as not done.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._link: _Link | None = None
        self._running: asyncio.Task[None] | None = None
        self._next_start = 0.0

    def submit(self, work: ConversionJob, *data: bytes | memoryview) -> OffloadFuture | None:
        """Have a piece of work done; None where it is sooner done here."""
        if not _SMALLEST <= sum(map(len, data)) <= MAX_WORK_SIZE:
            return None
        if self._link is None:
            self._start()
            return None
        return self._link.send(work, data)

    async def close(self) -> None:
        """End the helper."""
        self._next_start = float("inf")
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _start(self) -> None:
        now = self._loop.time()
        if now < self._next_start or (self._running is not None and not self._running.done()):
            return
        self._next_start = now + _PAUSE
        self._running = self._loop.create_task(self._run())

    async def _run(self) -> None:
        ours, its = socket.socketpair()
        memory = create_memory()
        with its, os.fdopen(memory):
            slots = SharedSlots(memory)
            process = subprocess.Popen(  # noqa: ASYNC220, S603  # ours, and quickly started
                [sys.executable, "-m", "gateway.offload", str(its.fileno()), str(memory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno(), memory],
            )
        link = None
        try:
            _, link = await self._loop.create_connection(lambda: _Link(slots), sock=ours)
            self._link = link
            await link.lost
            _log.warning("the helper process %d ended; another one is started", process.pid)
        finally:
            self._link = None
            if link is None:
                ours.close()
            else:
                link.transport.abort()
            process.kill()
            # It is dead within no time, and must not stay as a zombie.
            await asyncio.shield(self._loop.run_in_executor(None, process.wait))


@dataclass(eq=False)
class _Loan(OffloadFuture):
    """Work that lies in a slot."""

    link: _Link
    work: ConversionJob
    slot: int
    size: int

    def end(self, result: bytes | memoryview | None) -> None:
        self.done = True
        self.result = result

    async def wait(self) -> None:
        # Who waits has nothing else to do, and the helper may have to share its core with others:
        # what it would come to last is done here, until it has done the rest.
        for loan in self.link.lent_last_first():
            if self.done:
                return
            if not loan.done:
                self.link.do_here(loan)
                await asyncio.sleep(0)


class _Link(asyncio.Protocol):
    """The connection to the helper."""

    transport: asyncio.Transport

    def __init__(self, slots: SharedSlots) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = MessageReader()
        self._slots = slots
        self._free = list(range(SLOT_COUNT))
        self._loans: deque[_Loan] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._ready = False
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def send(
        self, work: ConversionJob, data: tuple[bytes | memoryview, ...]
    ) -> OffloadFuture | None:
        """Send a piece of work; None where there is enough to do already."""
        if not self._free or not self._ready or self.transport.is_closing():
            return None
        slot = self._free.pop()
        size = self._slots.put_work(slot, data)
        loan = _Loan(self, work, slot, size)
        self._loans.append(loan)
        self.transport.write(MESSAGE.pack(work_code(work), slot, size))
        if self._watch is None:
            self._watch = self._loop.call_later(_PATIENCE, self._look, loan)
        return loan

    def lent_last_first(self) -> list[_Loan]:
        """Give the loans that the helper has not answered, the last one first."""
        return list(reversed(self._loans))

    def do_here(self, loan: _Loan) -> None:
        """Do a piece of work that the helper has; it need not begin with it any more."""
        self._slots.cancel(loan.slot)
        loan.end(run_job(loan.work, self._slots.work(loan.slot, loan.size)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take results, which come in the order of the work."""
        tickets = self._reader.feed(data)
        if tickets and not self._ready:
            self._ready = True
            del tickets[0]
        for mark, slot, size in tickets:
            loan = self._loans.popleft()
            if not loan.done:
                loan.end(self._slots.result(slot, size) if mark == DONE else None)
            self._free.append(slot)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count all that is not done as not to be done."""
        if self._watch is not None:
            self._watch.cancel()
        while self._loans:
            loan = self._loans.popleft()
            if not loan.done:
                loan.end(None)
        if not self.lost.done():
            self.lost.set_result(None)

    def _look(self, loan: _Loan) -> None:
        """Give the helper up where it has not done in time what it had to."""
        self._watch = None
        if loan in self._loans:
            _log.warning("the helper process did nothing for %g s", _PATIENCE)
            self.transport.abort()
        elif self._loans:
            self._watch = self._loop.call_later(_PATIENCE, self._look, self._loans[-1])
