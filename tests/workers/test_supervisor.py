"""The supervisor: its start and stop, and how it accepts. Most tests are programs that fork."""

import selectors
import signal
import socket
import time
from collections import deque
from contextlib import ExitStack
from typing import cast

import pytest

from gateway.workers.acceptor import Acceptor
from gateway.workers.ipc import ToWorker
from gateway.workers.worker_pool import WorkerPool, WorkerProcess, WorkerState
from tests.support.checks.descriptors import no_descriptors
from tests.support.gateway_process import run, running_process
from tests.workers.programs import COUNTING_WORKER, command


@pytest.mark.parametrize(
    ("main", "workers", "said"),
    [
        ("os._exit(3)", 3, "ended with status 3"),
        ("raise RuntimeError('no luck')", 1, "RuntimeError: no luck"),
    ],
)
async def test_supervisor_gives_up_if_no_worker_comes_up(
    main: str, workers: int, said: str
) -> None:
    status, out, err = await run(*command(main, workers))
    assert (status, out) == (0, "no worker came up\n")
    assert err.count(said) == err.count("ended with status") == workers
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
        return sockets if requested else None

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


async def test_admin_process_that_fails_again_and_again_keeps_no_client_waiting() -> None:
    """Who connects to it waits; the client does not."""
    setup = """
admin = socket.create_server(('127.0.0.1', 0))
admin_sockets = {admin: ToWorker.ADMIN}
print('ports', *[each.getsockname()[1] for each in (sock, admin)], file=sys.stderr, flush=True)
"""
    program = command(COUNTING_WORKER, 1, setup=setup, admin="os._exit(3)")
    async with running_process(*program) as process:
        found = await process.wait_for_output(r"ports (\d+) (\d+)")
        await process.wait_for_output("started")
        with ExitStack() as clients:
            for port in found.groups():
                clients.enter_context(socket.create_connection(("127.0.0.1", int(port))))
            await process.wait_for_output("another one starts in 0.4 s")
            process.signal(signal.SIGTERM)
            assert (await process.end())[:2] == (0, "dropped 1\n")


class _Pool:
    """A pool with one worker that is ready."""

    def __init__(self, channel: socket.socket) -> None:
        self.has_started, self.is_stopping = True, False
        self.processes = [WorkerProcess(1, channel, 0.0)]
        self.processes[0].state = WorkerState.READY
        self.pending: dict[int, deque[socket.socket]] = {1: deque(), 2: deque()}


def test_supervisor_without_descriptors_accepts_again_soon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Operators and clients do not wait for each other, nor for seconds."""
    ours, theirs = socket.socketpair()
    sock = socket.create_server(("127.0.0.1", 0))
    with ours, theirs, sock, socket.create_connection(sock.getsockname()):
        selector = selectors.PollSelector()
        pool = cast("WorkerPool", _Pool(ours))
        acceptor = Acceptor({sock: ToWorker.CLIENT}, pool, selector)

        def accept() -> None:
            acceptor.accept_if_possible()
            seconds = acceptor.next_step - time.monotonic()
            for key, _ in selector.select(min(seconds, 5)):
                key.data()

        with no_descriptors():
            accept()
            assert acceptor.next_step < time.monotonic() + 0.1
            for _ in range(4):
                accept()
        assert caplog.messages == ["cannot accept a connection: Too many open files"]
        while not acceptor.has_pending_clients:
            accept()
        acceptor.close_in_child()
        pool.pending[ToWorker.CLIENT].pop().close()


async def test_client_whose_handshake_is_under_way_at_the_stop_is_served() -> None:
    setup = """
from tests.support.servers.stalled_handshakes import stall_handshakes
stall_handshakes(sock)
print('port', sock.getsockname()[1], file=sys.stderr, flush=True)
"""
    async with running_process(*command(COUNTING_WORKER, 2, setup=setup)) as process:
        port = int((await process.wait_for_output(r"port (\d+)"))[1])
        await process.wait_for_output("started")
        with socket.create_connection(("127.0.0.1", port)) as client:
            process.signal(signal.SIGTERM)
            client.sendall(b"what ends the handshake")
            assert (await process.end())[:2] == (0, "dropped 1\n")
