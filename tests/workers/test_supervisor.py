"""The supervisor's start and stop: each test is a program of its own, as it forks."""

import signal
import socket
from contextlib import ExitStack

import pytest

from tests.support.gateway_process import run, running_process
from tests.workers.programs import command


@pytest.mark.parametrize("workers", [1, 3])
async def test_supervisor_gives_up_if_no_worker_comes_up(workers: int) -> None:
    status, out, err = await run(*command("os._exit(3)", workers))
    assert (status, out) == (0, "no worker came up\n")
    assert err.count("ended with status 3") == workers
    assert "started" not in err


async def test_supervisor_gives_up_if_it_cannot_fork() -> None:
    no_fork = """
def fork(): raise BlockingIOError(11, 'no more processes')
os.fork = fork
"""
    status, out, err = await run(*command("pass", 2, setup=no_fork))
    assert (status, out) == (0, "no worker came up\n")
    assert err.count("cannot start a worker: no more processes; next try in 0.1 s") == 2


async def test_signal_stops_workers_that_are_not_ready_yet() -> None:
    main = "print('here', file=sys.stderr, flush=True); next_message(channel)"
    async with running_process(*command(main, 2)) as process:
        await process.wait_for_output("here")
        process.signal(signal.SIGINT)
        status, out, err = await process.end()
    assert (status, out) == (0, "dropped 0\n")
    assert "started" not in err
    assert err.count("stopping") == 1


async def test_supervisor_hands_out_clients_of_an_update_that_a_signal_interrupts() -> None:
    """Of two addresses one stays and one is new; each worker counts its connections.

    Those to the new address, which is the admin address, count a hundred.
    """
    main = """
channel.send_ready(); got = 0
while (message := next_message(channel)) and message[0] != ToWorker.DRAIN:
    kind, _ = message
    got += {ToWorker.CLIENT: 1, ToWorker.ADMIN: 100}.get(kind, 0)
    if kind in (ToWorker.CLIENT, ToWorker.ADMIN): channel._send(FromWorker.RECEIVED)
    if kind == ToWorker.RELOAD: os.write(2, b'has it\\n')  # whole, unlike print
channel.send_dropped(got)
"""
    setup = """
class Source:
    def poll(self, requested):
        sockets = {sock: ToWorker.CLIENT, new: ToWorker.ADMIN}
        return ConfigUpdate(b'x', sockets, 0.1) if requested else None

    def on_applied(self, errors): print('applied')

source = Source()
new = socket.create_server(('127.0.0.1', 0))
ports = [each.getsockname()[1] for each in (sock, new)]
print('ports', *ports, file=sys.stderr, flush=True)
"""
    async with running_process(*command(main, 2, setup=setup)) as process:
        found = await process.wait_for_output(r"ports (\d+) (\d+)")
        await process.wait_for_output("started")
        process.signal(signal.SIGHUP)
        await process.wait_for_output("has it\n(.*\n)*has it")
        with ExitStack() as clients:
            for port in found.groups():
                clients.enter_context(socket.create_connection(("127.0.0.1", int(port))))
            process.signal(signal.SIGTERM)
            status, out, err = await process.end()
    assert (status, out) == (0, "dropped 101\n")
    assert err.splitlines()[-1] == "stopping"
