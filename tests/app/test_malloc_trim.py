import subprocess
import sys

import pytest

from gateway.system.memory import has_malloc_trim

MIB = 2**20

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
