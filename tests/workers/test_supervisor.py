"""The supervisor's start and stop: each test is a program of its own, as it forks."""

import os
import signal
import socket
from contextlib import ExitStack

import pytest

from tests.support.gateway_process import Process, run, running_process
from tests.workers.programs import COUNTING_WORKER, command


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


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGTERM, "dropped 0\n"), (signal.SIGINT, "interrupted\n")],
    ids=["SIGTERM", "SIGINT"],
)
async def test_signal_stops_workers_that_are_not_ready_yet(number: int, expected: str) -> None:
    main = "print('here', file=sys.stderr, flush=True); next_message(channel)"
    async with running_process(*command(main, 2)) as process:
        await process.wait_for_output("here")
        process.signal(number)
        status, out, err = await process.end()
    assert (status, out) == (0, expected)
    assert "started" not in err
    assert err.count("stopping") == 1


async def test_supervisor_hands_out_clients_of_an_update_that_a_signal_interrupts() -> None:
    """Of two addresses one stays and one is new; each worker counts its connections."""
    main = """
channel.send(FromWorker.READY); got = 0
while (message := next_message(channel)) and message[0] != ToWorker.DRAIN:
    kind = message[0]
    got += kind == ToWorker.CLIENT
    if kind == ToWorker.CLIENT: channel.send(FromWorker.RECEIVED)
    if kind == ToWorker.PREPARE: os.write(2, b'has it\\n')  # whole, unlike print
channel.send(FromWorker.DROPPED, str(got))
"""
    setup = """
class Source(Gateway):
    def poll(self, requested):
        sockets = {sock: ToWorker.CLIENT, new: ToWorker.CLIENT}
        return ConfigUpdate(sockets, 0.1) if requested else None

    def commit(self): print('applied')

gateway = Source()
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
    assert (status, out) == (0, "dropped 2\n")
    assert err.splitlines()[-1] == "stopping"


ADMIN = """
os.write(2, b'admin %d\\n' % os.getpid())  # whole, unlike print
channel.send(FromWorker.READY); got = 0
while (message := next_message(channel)) and message[0] != ToWorker.DRAIN:
    if message[0] == ToWorker.ADMIN:
        got += 100; channel.send(FromWorker.RECEIVED)
channel.send(FromWorker.DROPPED, str(got))
os.write(2, b'admin drained\\n')
"""
WORKER = f"""
{COUNTING_WORKER}
time.sleep(0.2)
os.write(2, b'worker drained\\n')  # whole, unlike print
"""
WITH_ADMIN = """
admin = socket.create_server(('127.0.0.1', 0))
admin_sockets = {admin: ToWorker.ADMIN}
print('ports', *[each.getsockname()[1] for each in (sock, admin)], file=sys.stderr, flush=True)
"""


async def _connect_to(process: Process, exits: ExitStack) -> None:
    found = await process.wait_for_output(r"ports (\d+) (\d+)")
    for port in found.groups():
        exits.enter_context(socket.create_connection(("127.0.0.1", int(port))))


async def test_operators_go_to_the_admin_process_which_ends_behind_the_workers() -> None:
    program = command(WORKER, 2, setup=WITH_ADMIN, admin=ADMIN)
    async with running_process(*program) as process:
        await process.wait_for_output(r"admin \d+")
        await process.wait_for_output("started")
        with ExitStack() as clients:
            await _connect_to(process, clients)
            process.signal(signal.SIGTERM)
            status, out, err = await process.end()
    assert (status, out) == (0, "dropped 101\n")
    assert err.splitlines()[-4:] == ["stopping", *["worker drained"] * 2, "admin drained"]


async def test_admin_process_that_dies_is_replaced_and_delays_no_client() -> None:
    program = command(WORKER, 1, setup=WITH_ADMIN, admin=ADMIN)
    async with running_process(*program) as process:
        pid = int((await process.wait_for_output(r"admin (\d+)"))[1])
        await process.wait_for_output("started")
        os.kill(pid, signal.SIGKILL)
        await process.wait_for_output(f"admin process {pid} was killed by SIGKILL; another one")
        with ExitStack() as clients:
            await _connect_to(process, clients)
            await process.wait_for_output(rf"admin process (?!{pid})\d+ is up")
            process.signal(signal.SIGTERM)
            assert (await process.end())[:2] == (0, "dropped 101\n")


async def test_processes_that_die_and_their_successors_are_reported() -> None:
    program = command(WORKER, 1, setup=WITH_ADMIN, admin=ADMIN)
    async with running_process(*program) as process:
        admin = int((await process.wait_for_output(r"admin (\d+)"))[1])
        worker = int((await process.wait_for_output(r"started (\d+)"))[1])
        for name, pid in (("worker", worker), ("admin process", admin)):
            os.kill(pid, signal.SIGKILL)
            await process.wait_for_output(f"end of {name} {pid}")
            await process.wait_for_output(rf"successor {name} (?!{pid})\d+")
        process.signal(signal.SIGTERM)
        _, _, err = await process.end()
    # Those that start at first, or end with the gateway, are none.
    assert (err.count("successor "), err.count("end of ")) == (2, 2)


async def test_admin_process_that_fails_again_and_again_keeps_no_client_waiting() -> None:
    program = command(WORKER, 1, setup=WITH_ADMIN, admin="os._exit(3)")
    async with running_process(*program) as process:
        await process.wait_for_output("started")
        with ExitStack() as clients:
            await _connect_to(process, clients)
            await process.wait_for_output("another one starts in 0.4 s")
            process.signal(signal.SIGTERM)
            assert (await process.end())[:2] == (0, "dropped 1\n")


@pytest.mark.parametrize("has_admin_first", [False, True])
async def test_admin_process_runs_while_there_is_an_admin_address(has_admin_first: bool) -> None:
    setup = f"""
class Source(Gateway):
    has_admin = {has_admin_first}

    def poll(self, requested):
        if not requested: return None
        self.has_admin = not self.has_admin
        return ConfigUpdate({{sock: ToWorker.CLIENT, **self.admin}}, 0.1)

    @property
    def admin(self): return {{admin.dup(): ToWorker.ADMIN}} if self.has_admin else {{}}

    def commit(self): pass

    def on_applied(self, late): print('applied', *late, file=sys.stderr, flush=True)

admin = socket.create_server(('127.0.0.1', 0))
gateway = Source()
admin_sockets = gateway.admin
"""
    worker = """
channel.send(FromWorker.READY)
while (message := next_message(channel)) and message[0] != ToWorker.DRAIN:
    if message[0] in (ToWorker.PREPARE, ToWorker.COMMIT): channel.send(FromWorker.RELOAD_DONE)
"""
    admin = worker + "print('admin drained', file=sys.stderr, flush=True)"
    async with running_process(*command(worker, 1, setup=setup, admin=admin)) as process:
        await process.wait_for_output("started")
        for has_admin in (not has_admin_first, has_admin_first):
            process.said = ""
            process.signal(signal.SIGHUP)
            await process.wait_for_output("applied\n")
            await process.wait_for_output(r"admin process \d+ is up" if has_admin else "drained")
        process.signal(signal.SIGTERM)
        assert (await process.end())[:2] == (0, "dropped 0\n")
