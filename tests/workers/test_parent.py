"""The parent with workers that fail: each test is a program of its own, as it forks."""

import re
import signal
import socket
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.servers.command import run, started
from tests.servers.running_gateway import until

PROGRAM = """
import gc, logging, os, signal, socket, sys, time
from gateway.workers import parent
from gateway.workers.parent import NoWorkerError, Parent
from gateway.workers.post import CLIENT, OPERATOR

logging.basicConfig(level="INFO", format="%(message)s")

class Events:
    def begun(self, workers):
        print("begun", *workers, file=sys.stderr, flush=True)

    def stopping(self):
        print("stopping", file=sys.stderr, flush=True)

def work(post):
    {work}

parent._LAST_MOMENT = {last_moment}
try:
    sock = socket.create_server(("127.0.0.1", 0))
    print("dropped", Parent({{sock: CLIENT}}, {workers}, work, 0.1, Events()).run())
except NoWorkerError as error:
    print(error)
"""


def _command(work: str, workers: int, last_moment: float = 30) -> tuple[str, ...]:
    program = PROGRAM.format(work=work, workers=workers, last_moment=last_moment)
    return (sys.executable, "-c", program)


@pytest.mark.parametrize("workers", [1, 3])
async def test_where_no_worker_comes_up_it_gives_up(workers: int) -> None:
    status, out, err = await run(*_command("os._exit(3)", workers))
    assert (status, out) == (0, "no worker came up\n")
    assert err.count("ended with status 3") == workers
    assert "begun" not in err


async def test_where_no_process_can_be_had_it_gives_up() -> None:
    no_fork = "def fork(): raise BlockingIOError(11, 'no more processes')\nos.fork = fork\n"
    *python, program = _command("pass", 2)
    status, out, err = await run(*python, program.replace("try:", f"{no_fork}try:", 1))
    assert (status, out) == (0, "no worker came up\n")
    assert err.count("cannot start a worker: no more processes; next try in 0.1 s") == 2


async def test_a_worker_that_raises_says_why() -> None:
    status, out, err = await run(*_command("raise RuntimeError('no luck')", 1))
    assert (status, out) == (0, "no worker came up\n")
    assert "RuntimeError: no luck" in err
    assert "ended with status 1" in err


async def test_workers_that_die_again_and_again_come_back_later_and_later() -> None:
    async with started(*_command("post.is_up(); os._exit(3)", 1)) as process:
        for pause in ("0.1", "0.2", "0.4"):
            await process.until_it_says(rf"status 3; another one starts in {re.escape(pause)} s")
        process.signal(signal.SIGTERM)
        status, out, err = await process.end()
    assert (status, out) == (0, "dropped 0\n")
    assert err.splitlines()[-1] == "stopping"


async def test_a_worker_that_does_not_stop_is_killed() -> None:
    work = "signal.pthread_sigmask(signal.SIG_BLOCK, [15]); post.is_up(); time.sleep(60)"
    async with started(*_command(work, 2, last_moment=0.1)) as process:
        await process.until_it_says("begun")
        process.signal(signal.SIGTERM)
        status, out, err = await process.end()
    assert (status, out) == (0, "dropped 0\n")
    assert err.count("did not stop in time and is killed") == 2
    assert err.count("was killed by SIGKILL") == 2


async def test_a_signal_before_the_workers_are_up_stops_them_too() -> None:
    work = "print('here', file=sys.stderr, flush=True); post._channel.recv(2)"
    async with started(*_command(work, 2)) as process:
        await process.until_it_says("here")
        process.signal(signal.SIGINT)
        status, out, err = await process.end()
    assert (status, out) == (0, "dropped 0\n")
    assert "begun" not in err
    assert err.count("stopping") == 1


async def test_what_workers_drop_is_summed_up() -> None:
    work = "post.is_up(); post._channel.recv(2); post.has_dropped(2)"
    async with started(*_command(work, 3)) as process:
        await process.until_it_says("begun")
        process.signal(signal.SIGTERM)
        assert (await process.end())[:2] == (0, "dropped 6\n")


async def test_a_handshake_under_way_at_the_end_is_waited_for() -> None:
    """Each worker tells how many connections it got, as if it had dropped so many exchanges."""
    work = (
        "post.is_up(); got = 0\n"
        "    while socket.recv_fds(post._channel, 1, 2)[0] == b'+':\n"
        "        got += 1; post._say(b'+')\n"
        "    post.has_dropped(got)"
    )
    *python, program = _command(work, 2)
    held = "from tests.servers.handshakes import hold_handshakes\n    hold_handshakes(sock)\n"
    port = "    print('port', sock.getsockname()[1], file=sys.stderr, flush=True)\n"
    program = program.replace('    print("dropped"', f'    {held}{port}    print("dropped"', 1)
    async with started(*python, program) as process:
        number = int((await process.until_it_says(r"port (\d+)"))[1])
        await process.until_it_says("begun")
        with socket.create_connection(("127.0.0.1", number)) as client:
            process.signal(signal.SIGTERM)
            client.sendall(b"what ends the handshake")
            assert (await process.end())[:2] == (0, "dropped 1\n")


async def test_a_signal_while_orders_are_under_way_stops_it_as_ever() -> None:
    """Of two addresses one stays and one is new; each worker tells how many connections it got.

    Those of operators, who are the ones at the new address, count a hundred.
    """
    work = (
        "post.is_up(); got = 0\n"
        "    while (word := socket.recv_fds(post._channel, 1, 2)[0]) not in (b'.', b''):\n"
        "        got += {b'+': 1, b'*': 100}.get(word, 0)\n"
        "        if word in b'+*': post._say(b'+')\n"
        "        if word == b'=': os.write(2, b'has it\\n')  # whole, unlike print\n"
        "    post.has_dropped(got)"
    )
    *python, program = _command(work, 2)
    superior = (
        "class Superior:\n"
        "    def look(self, wished):\n"
        "        return Orders(b'x', {sock: CLIENT, new: OPERATOR}, 0.1) if wished else None\n"
        "\n"
        "    def carried_out(self, faults): print('carried out')\n"
        "\n"
    )
    ports = (
        "    new = socket.create_server(('127.0.0.1', 0))\n"
        "    ports = [each.getsockname()[1] for each in (sock, new)]\n"
        "    print('ports', *ports, file=sys.stderr, flush=True)\n"
    )
    program = program.replace(
        "def work", f"from gateway.workers.orders import Orders\n{superior}def work", 1
    )
    program = program.replace('    print("dropped"', f'{ports}    print("dropped"', 1)
    program = program.replace("Events())", "Events(), Superior())", 1)
    async with started(*python, program) as process:
        found = await process.until_it_says(r"ports (\d+) (\d+)")
        await process.until_it_says("begun")
        process.signal(signal.SIGHUP)
        await process.until_it_says("has it\n(.*\n)*has it")
        with ExitStack() as clients:
            for port in found.groups():
                clients.enter_context(socket.create_connection(("127.0.0.1", int(port))))
            process.signal(signal.SIGTERM)
            status, out, err = await process.end()
    assert (status, out) == (0, "dropped 101\n")
    assert err.splitlines()[-1] == "stopping"


def _is_gone(pid: str) -> bool:
    return not Path("/proc", pid).exists()


async def test_what_a_dead_worker_leaves_behind_does_not_stay() -> None:
    """As process 1 of a container the parent gets the children of its workers."""
    work = (
        "post.is_up()\n"
        "    if os.fork() == 0:\n"
        "        post._channel.close()\n"
        "        while os.getppid() != parent_id: time.sleep(0.01)\n"
        "        os.write(2, b'orphan %d\\n' % os.getpid())\n"
        "        os._exit(0)\n"
        "    os._exit(3)"
    )
    *python, program = _command(work, 1)
    # PR_SET_CHILD_SUBREAPER, which makes it in this what process 1 is.
    adopts = "import ctypes\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\nparent_id = os.getpid()\n"
    async with started(*python, program.replace("try:", f"{adopts}try:", 1)) as process:
        for _ in range(2):
            found = await process.until_it_says(r"orphan (\d+)")
            process.said = ""
            await until(partial(_is_gone, found[1]))
        process.signal(signal.SIGTERM)
        status, out, _ = await process.end()
    assert (status, out) == (0, "dropped 0\n")
