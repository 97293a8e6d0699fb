"""What all processes have: tasks in the background, and memory to give back."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from gateway.app.process import BackgroundTask
from gateway.system.memory import has_malloc_trim

MIB = 2**20


class _Noting(BackgroundTask):
    def __init__(self) -> None:
        self.notes: list[str] = []

    async def run(self) -> None:
        self.notes.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.notes.append("ended")


async def test_background_task_runs_while_its_context_is_open() -> None:
    async with _Noting() as noting:
        await asyncio.sleep(0)
        assert noting.notes == ["begun"]
    assert noting.notes == ["begun", "ended"]


async def test_failed_background_task_is_logged_and_ends_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(BackgroundTask):
        async def run(self) -> None:
            raise ValueError("failed")

    async with Failing():
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # from Python 3.12 on, a task can be awaited before its callbacks run
    assert caplog.messages == ["background task Failing failed and stopped"]
    assert "ValueError: failed" in caplog.text


# In a process of its own, as malloc_trim concerns the whole process.
PROGRAM = """
import asyncio, resource, time
from gateway.app import process
from gateway.system.memory import resident_bytes, tune_malloc

process._INTERVAL = 0.05
tune_malloc()

async def main():
    before = resident_bytes()
    bodies, rest = [], []
    async with process.MallocTrim():
        await asyncio.sleep(0)
        most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no file can be opened
        await asyncio.sleep(4 * process._INTERVAL)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        for _ in range(500):
            bodies.append([bytes(40_000) for _ in range(10)])
            rest.append(bytes(1000))
        bodies.clear()
        print(resident_bytes() - before)
        until = time.monotonic() + 30
        while resident_bytes() - before > {spare} and time.monotonic() < until:
            await asyncio.sleep(0.05)
        print(resident_bytes() - before)

asyncio.run(main())
"""


@pytest.mark.skipif(not has_malloc_trim(), reason="the C library gives nothing back")
def test_freed_memory_goes_back_below_memory_in_use() -> None:
    program = PROGRAM.format(spare=64 * MIB)
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    freed, kept = map(int, output.stdout.split())
    assert freed > 128 * MIB
    assert kept < 64 * MIB
