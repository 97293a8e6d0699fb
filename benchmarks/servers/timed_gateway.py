"""Run a gateway and measure how long its event loop is held.

How: a callback that schedules itself again runs once in each turn of the loop. What lies between
two of its runs is one turn: every callback that was ready, and every read and write that the
loop did by itself. It never includes waiting for the network, as a loop that has a callback
ready does not wait. With one exchange under way a turn is hardly more than one hold; what it is
more makes the result too large, never too small. It is also what another client has to wait.
The cyclic garbage collector runs in the same thread, so its pauses are in it.

Other processes and other virtual machines take the core away at times, for longer than what is
measured, which no gateway can help. So a turn counts with the CPU time of the loop's thread, in
which all that it computes is, page faults and system calls too. Only where the thread gave up the
core by itself (getrusage(2), ru_nvcsw), so in a call that blocks, the time on the clock counts,
less the time in which it waited for a core (proc(5), /proc/PID/schedstat, second field).

Usage: python -m benchmarks.servers.timed_gateway --config FILE
It prints the result when it is ended.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
from pathlib import Path
from time import perf_counter_ns, thread_time_ns

import orjson
import uvloop

from gateway.app.gateway import Gateway
from gateway.settings.load import load
from gateway.settings.schema import Settings

RESULT_MARK = "turns in nanoseconds: "

_SHORTEST = 50_000
"""Nanoseconds below which a turn is none in which anything was converted."""


class SliceTimer:
    """Notes the length of each turn of the running loop, in nanoseconds."""

    def __init__(self) -> None:
        self.slices: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._look()
        self._loop.call_soon(self._slice)

    def _look(self) -> None:
        self._blocked = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        self._waited = int(os.pread(self._schedstat, 64, 0).split()[1])
        self._cpu_time = thread_time_ns()
        self._time = perf_counter_ns()

    def _slice(self) -> None:
        blocked, waited, cpu_time, time = self._blocked, self._waited, self._cpu_time, self._time
        self._look()
        length = self._cpu_time - cpu_time
        if self._blocked != blocked:
            length = self._time - time - (self._waited - waited)
        if length >= _SHORTEST:
            self.slices.append(length)
        self._loop.call_soon(self._slice)


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Gateway(settings) as gateway:
        gc.collect()
        gc.freeze()  # as ``tensorgate serve`` does once it has started
        print(f"listening on {gateway.addresses[0]}", flush=True)
        watch = SliceTimer()
        await stop.wait()
    print(RESULT_MARK + orjson.dumps(watch.slices).decode(), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(load(Path(sys.argv[-1]), os.environ)))
