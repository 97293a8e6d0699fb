"""Workers that fail: each test is a program of its own, as it forks."""

import re
import signal
from functools import partial
from pathlib import Path

from tests.support.gateway import until
from tests.support.gateway_process import run, running_process
from tests.workers.programs import command


async def test_a_worker_that_raises_says_why() -> None:
    status, out, err = await run(*command("raise RuntimeError('no luck')", 1))
    assert (status, out) == (0, "no worker came up\n")
    assert "RuntimeError: no luck" in err
    assert "ended with status 1" in err


async def test_workers_that_die_again_and_again_come_back_later_and_later() -> None:
    async with running_process(*command("post.send_ready(); os._exit(3)", 1)) as process:
        for pause in ("0.1", "0.2", "0.4"):
            await process.wait_for_output(rf"status 3; another one starts in {re.escape(pause)} s")
        process.signal(signal.SIGTERM)
        status, out, err = await process.end()
    assert (status, out) == (0, "dropped 0\n")
    assert err.splitlines()[-1] == "stopping"


async def test_a_worker_that_does_not_stop_is_killed() -> None:
    work = "signal.pthread_sigmask(signal.SIG_BLOCK, [15]); post.send_ready(); time.sleep(60)"
    async with running_process(*command(work, 2, last_moment=0.1)) as process:
        await process.wait_for_output("begun")
        process.signal(signal.SIGTERM)
        status, out, err = await process.end()
    assert (status, out) == (0, "dropped 0\n")
    assert err.count("did not stop in time and is killed") == 2
    assert err.count("was killed by SIGKILL") == 2


async def test_what_workers_drop_is_summed_up() -> None:
    work = "post.send_ready(); post._channel.recv(2); post.send_dropped(2)"
    async with running_process(*command(work, 3)) as process:
        await process.wait_for_output("begun")
        process.signal(signal.SIGTERM)
        assert (await process.end())[:2] == (0, "dropped 6\n")


def _is_gone(pid: str) -> bool:
    return not Path("/proc", pid).exists()


async def test_what_a_dead_worker_leaves_behind_does_not_stay() -> None:
    """As process 1 of a container the parent gets the children of its workers."""
    work = (
        "post.send_ready()\n"
        "    if os.fork() == 0:\n"
        "        post._channel.close()\n"
        "        while os.getppid() != parent_id: time.sleep(0.01)\n"
        "        os.write(2, b'orphan %d\\n' % os.getpid())\n"
        "        os._exit(0)\n"
        "    os._exit(3)"
    )
    *python, program = command(work, 1)
    # PR_SET_CHILD_SUBREAPER, which makes it in this what process 1 is.
    adopts = "import ctypes\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\nparent_id = os.getpid()\n"
    async with running_process(*python, program.replace("try:", f"{adopts}try:", 1)) as process:
        for _ in range(2):
            found = await process.wait_for_output(r"orphan (\d+)")
            process.said = ""
            await until(partial(_is_gone, found[1]))
        process.signal(signal.SIGTERM)
        status, out, _ = await process.end()
    assert (status, out) == (0, "dropped 0\n")
