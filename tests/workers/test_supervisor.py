"""The parent, begun and stopped: each test is a program of its own, as it forks."""

import signal
import socket
from contextlib import ExitStack

import pytest

from tests.support.gateway_process import run, running_process
from tests.workers.programs import command


@pytest.mark.parametrize("workers", [1, 3])
async def test_where_no_worker_comes_up_it_gives_up(workers: int) -> None:
    status, out, err = await run(*command("os._exit(3)", workers))
    assert (status, out) == (0, "no worker came up\n")
    assert err.count("ended with status 3") == workers
    assert "begun" not in err


async def test_where_no_process_can_be_had_it_gives_up() -> None:
    no_fork = "def fork(): raise BlockingIOError(11, 'no more processes')\nos.fork = fork\n"
    *python, program = command("pass", 2)
    status, out, err = await run(*python, program.replace("try:", f"{no_fork}try:", 1))
    assert (status, out) == (0, "no worker came up\n")
    assert err.count("cannot start a worker: no more processes; next try in 0.1 s") == 2


async def test_a_signal_before_the_workers_are_up_stops_them_too() -> None:
    work = "print('here', file=sys.stderr, flush=True); post._channel.recv(2)"
    async with running_process(*command(work, 2)) as process:
        await process.wait_for_output("here")
        process.signal(signal.SIGINT)
        status, out, err = await process.end()
    assert (status, out) == (0, "dropped 0\n")
    assert "begun" not in err
    assert err.count("stopping") == 1


async def test_a_signal_while_orders_are_under_way_stops_it_as_ever() -> None:
    """Of two addresses one stays and one is new; each worker tells how many connections it got.

    Those of operators, who are the ones at the new address, count a hundred.
    """
    work = (
        "post.send_ready(); got = 0\n"
        "    while (word := socket.recv_fds(post._channel, 1, 2)[0]) not in (b'.', b''):\n"
        "        got += {b'+': 1, b'*': 100}.get(word, 0)\n"
        "        if word in b'+*': post._say(b'+')\n"
        "        if word == b'=': os.write(2, b'has it\\n')  # whole, unlike print\n"
        "    post.send_dropped(got)"
    )
    *python, program = command(work, 2)
    superior = (
        "class Superior:\n"
        "    def look(self, wished):\n"
        "        return ConfigUpdate(b'x', {sock: CLIENT, new: ADMIN}, 0.1) if wished else None\n"
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
        "def work",
        f"from gateway.workers.reload_broadcast import ConfigUpdate\n{superior}def work",
        1,
    )
    program = program.replace('    print("dropped"', f'{ports}    print("dropped"', 1)
    program = program.replace("Events())", "Events(), Superior())", 1)
    async with running_process(*python, program) as process:
        found = await process.wait_for_output(r"ports (\d+) (\d+)")
        await process.wait_for_output("begun")
        process.signal(signal.SIGHUP)
        await process.wait_for_output("has it\n(.*\n)*has it")
        with ExitStack() as clients:
            for port in found.groups():
                clients.enter_context(socket.create_connection(("127.0.0.1", int(port))))
            process.signal(signal.SIGTERM)
            status, out, err = await process.end()
    assert (status, out) == (0, "dropped 101\n")
    assert err.splitlines()[-1] == "stopping"
