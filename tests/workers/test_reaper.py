"""Children that have ended: the test is a program of its own, as it has some."""

import sys

from tests.support.gateway_process import run

PROGRAM = """
import os
from gateway.workers.reaper import reap_adopted_children

def child(status):
    pid = os.fork()
    if pid == 0:
        os._exit(status)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid

def left():
    return [each for each in children if os.path.exists(f"/proc/{each}")]

children = orphan, worker, behind = child(1), child(2), child(3)
reap_adopted_children([worker])
assert left() == [worker, behind], left()
assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 2
reap_adopted_children([])
assert left() == []
reap_adopted_children([])
alive, end = os.pipe()
if os.fork() == 0:
    os.close(end)
    os.read(alive, 1)
    os._exit(0)
reap_adopted_children([])
"""


async def test_all_but_workers_are_let_go() -> None:
    assert await run(sys.executable, "-c", PROGRAM) == (0, "", "")
