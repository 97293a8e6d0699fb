"""Runs a gateway and measures how long each time slice of its event loop takes.

A callback that schedules itself again runs once in each iteration of the loop. A time slice is what
lies between two of its runs: all ready callbacks, and the loop's own reads and writes. It never
includes waiting for the network, as a loop with a ready callback does not wait. Other clients wait
for as long. The cyclic garbage collector runs in the same thread, so its pauses count.

Other processes and virtual machines take the core away for longer than a slice. So a slice counts
with the CPU time of the loop's thread, which includes page faults and system calls. If the thread
blocked (getrusage(2), ru_nvcsw), the wall clock counts instead, without the time in which the
thread waited for a core (proc(5), /proc/PID/schedstat, second field).

The process is tuned as that of ``tensorgate serve`` is.

Usage: python -m benchmarks.servers.timed_gateway --config FILE
It prints the result when it gets SIGTERM.
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

from gateway.app.standalone import StandaloneGateway
from gateway.settings.load import load
from gateway.settings.schema import Settings
from gateway.system.memory import tune_garbage_collector, tune_malloc, tune_thread_switches

RESULT_MARK = "time slices in nanoseconds: "

_SHORTEST = 50_000
"""Nanoseconds below which a time slice converted nothing."""


class SliceTimer:
    """Records the nanoseconds of each time slice of the running loop."""

    def __init__(self) -> None:
        self.slices: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._read_clocks()
        self._loop.call_soon(self._slice)

    def _read_clocks(self) -> None:
        self._blocked = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        self._waited = int(os.pread(self._schedstat, 64, 0).split()[1])
        self._cpu_time = thread_time_ns()
        self._time = perf_counter_ns()

    def _slice(self) -> None:
        blocked, waited, cpu_time, time = self._blocked, self._waited, self._cpu_time, self._time
        self._read_clocks()
        length = self._cpu_time - cpu_time
        if self._blocked != blocked:
            length = self._time - time - (self._waited - waited)
        if length >= _SHORTEST:
            self.slices.append(length)
        self._loop.call_soon(self._slice)


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with StandaloneGateway(settings) as gateway:
        gc.collect()
        tune_garbage_collector()
        print(f"listening on {gateway.addresses[0]}", flush=True)
        watch = SliceTimer()
        await stop.wait()
    print(RESULT_MARK + orjson.dumps(watch.slices).decode(), flush=True)


if __name__ == "__main__":
    tune_malloc()
    tune_thread_switches()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(load(Path(sys.argv[-1]), os.environ)))
