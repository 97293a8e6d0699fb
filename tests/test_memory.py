import subprocess
import sys

MIB = 2**20

# In a process of its own, as what it does holds for all of it.
PROGRAM = """
import asyncio, time
from gateway import memory

memory._LOOK = 0.01
memory.keep_what_is_freed()

async def main():
    memory.settle()
    before = memory._resident()
    bodies, rest = [], []
    for _ in range(500):
        bodies.append([bytes(40_000) for _ in range(10)])
        rest.append(bytes(1000))
    bodies.clear()
    print(memory._resident() - before)
    until = time.monotonic() + 30
    while memory._resident() - before > {spare} and time.monotonic() < until:
        await asyncio.sleep(0.01)
    print(memory._resident() - before)

asyncio.run(main())
"""


def test_what_is_free_goes_back_though_some_above_it_stays() -> None:
    program = PROGRAM.format(spare=64 * MIB)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    freed, kept = map(int, said.stdout.split())
    assert freed > 128 * MIB
    assert kept < 64 * MIB


def test_without_a_loop_nobody_looks() -> None:
    program = "from gateway import memory; memory.settle(); print('settled')"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert said.stdout == b"settled\n"
