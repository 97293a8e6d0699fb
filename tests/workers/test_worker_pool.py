"""Workers as the supervisor sees them; those that fork are programs of their own."""

import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import cast

import pytest

from gateway.workers.acceptor import Acceptor
from gateway.workers.ipc import ConnectionKind, FromWorker, ToWorker, receive, send
from gateway.workers.worker_pool import (
    MAX_UNACKNOWLEDGED,
    WorkerPool,
    WorkerProcess,
    WorkerSlot,
    WorkerState,
    exit_text,
)
from tests.support.checks.descriptors import no_descriptors
from tests.support.gateway import until
from tests.support.gateway_process import run, running_process
from tests.workers.programs import COUNTING_WORKER, command


class _Worker:
    """A worker without a process: the test plays it."""

    def __init__(self, serves: ConnectionKind = ToWorker.CLIENT) -> None:
        ours, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.process = WorkerProcess(1, ours, 0.0, serves)

    def say(self, *messages: FromWorker, text: str = "") -> None:
        for message in messages:
            send(self.end, message, text)
            assert self.process.read_message()

    def send_connection(self, kind: ConnectionKind = ToWorker.CLIENT) -> bool:
        sock = socket.socket()
        is_sent = self.process.accepts(kind) and self.process.send_connection(sock)
        if not is_sent:
            sock.close()
        return is_sent

    def fill(self) -> None:
        while self.send_connection():
            pass

    def receive(self) -> int | None:
        """Return the kind of the next message; none at the end of the stream."""
        message = receive(self.end)
        if message is None:
            return None
        if message[2] >= 0:
            socket.close(message[2])
        return message[0]

    def close(self) -> None:
        for connection in self.process.unacknowledged:
            connection.close()
        self.process.channel.close()
        self.end.close()


@pytest.fixture
def worker() -> Iterator[_Worker]:
    """A worker that is ready."""
    worker = _Worker()
    worker.say(FromWorker.READY)
    yield worker
    worker.close()


@pytest.fixture
def counter() -> memoryview:
    return memoryview(bytearray(8)).cast("Q")


# ------------------------------------------------------------------------------------ connections


def test_full_worker_takes_connections_again_once_it_acknowledges(
    counter: memoryview, worker: _Worker
) -> None:
    """What is on the way fits into the channel, in both directions, with a DRAIN behind it."""
    slot = WorkerSlot(counter)
    assert slot.open_connections == 0
    slot.worker = worker.process
    worker.fill()
    assert worker.process.state is WorkerState.READY
    sent = worker.process.sent_connections
    assert sent == len(worker.process.unacknowledged) == MAX_UNACKNOWLEDGED > 100
    socks = list(worker.process.unacknowledged)
    worker.end.setblocking(False)
    for _ in range(sent):
        send(worker.end, FromWorker.RECEIVED)
    assert all(worker.process.read_message() for _ in range(sent - 1))
    assert [sock.fileno() < 0 for sock in socks] == [True] * (sent - 1) + [False]
    assert worker.process.read_message()
    assert not worker.process.unacknowledged
    assert slot.open_connections == sent
    counter[0] += 2
    assert slot.open_connections == sent - 2
    for _ in range(sent):
        assert worker.receive() == ToWorker.CLIENT
    worker.fill()
    for _ in range(2):
        worker.process.drain()
    assert [worker.receive() for _ in range(sent + 1)][-2:] == [ToWorker.CLIENT, ToWorker.DRAIN]


@pytest.mark.parametrize("kind", [ToWorker.CLIENT, ToWorker.ADMIN])
def test_process_takes_connections_of_its_kind_until_it_drains(kind: ConnectionKind) -> None:
    worker = _Worker(kind)
    other: ConnectionKind = ToWorker.ADMIN if kind == ToWorker.CLIENT else ToWorker.CLIENT
    assert not worker.send_connection(kind)
    worker.say(FromWorker.READY)
    assert not worker.send_connection(other)
    assert worker.send_connection(kind)
    worker.process.drain()
    assert worker.process.state is WorkerState.DRAINING
    assert not worker.send_connection(kind)
    assert [worker.receive() for _ in range(2)] == [kind, ToWorker.DRAIN]
    worker.close()


def test_worker_that_is_gone_takes_nothing(worker: _Worker) -> None:
    worker.end.close()
    assert not worker.send_connection()
    assert worker.process.state is WorkerState.EXITING
    worker.process.drain()
    assert worker.process.sent_connections == 0
    assert not worker.process.read_message()


def test_messages_of_a_worker_that_dies_with_connections_unread_are_read(worker: _Worker) -> None:
    for _ in range(3):
        assert worker.send_connection()
    assert worker.receive() == ToWorker.CLIENT
    send(worker.end, FromWorker.RECEIVED)
    send(worker.end, FromWorker.DROPPED, "7")
    worker.end.close()
    assert [worker.process.read_message() for _ in range(3)] == [True, True, False]
    assert len(worker.process.unacknowledged) == 2
    assert worker.process.dropped_calls == 7


# ------------------------------------------------------------------------------------- messages


def test_leaving_worker_takes_clients_until_it_is_drained(worker: _Worker) -> None:
    worker.say(FromWorker.LEAVING)
    assert worker.process.is_leaving
    assert worker.process.accepts(ToWorker.CLIENT)


def test_worker_that_was_drained_before_it_is_ready_stays_so() -> None:
    worker = _Worker()
    worker.process.drain()
    worker.say(FromWorker.READY)
    assert worker.process.state is WorkerState.DRAINING
    worker.close()


# --------------------------------------------------------------------------------- replacement


def test_workers_that_exit_early_are_replaced_after_growing_delays(counter: memoryview) -> None:
    slot = WorkerSlot(counter)
    delays = [slot.remove_worker(started_at=100.0, now=101.0) for _ in range(8)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert slot.start_at == 106.0
    for _ in range(5000):
        assert slot.remove_worker(started_at=100.0, now=100.0) == 5.0
    assert slot.remove_worker(started_at=100.0, now=110.0) == 0.0  # it ran for long
    assert slot.start_at == 110.0
    assert slot.remove_worker(started_at=110.0, now=111.0) == 0.1


def test_exit_codes_are_described() -> None:
    assert exit_text(0) == "ended with status 0"
    assert exit_text(3) == "ended with status 3"
    assert exit_text(-SIGKILL) == "was killed by SIGKILL"
    assert exit_text(-40) == "was killed by signal 40"


async def test_worker_that_does_not_stop_is_killed() -> None:
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [15])"
    main = f"{block}; channel.send(FromWorker.READY); time.sleep(60)"
    async with running_process(*command(main, 2, kill_delay=0.1)) as process:
        await process.wait_for_output("started")
        process.signal(signal.SIGTERM)
        status, out, err = await process.end()
    assert (status, out) == (0, "dropped 0\n")
    assert err.count("did not stop in time and is killed") == 2
    assert err.count("was killed by SIGKILL") == 2


# ------------------------------------------------------------------------------ adopted children


def _is_gone(pid: str) -> bool:
    return not Path("/proc", pid).exists()


async def test_children_of_a_dead_worker_are_reaped() -> None:
    """As process 1 of a container the supervisor gets the children of its workers."""
    main = """
channel.send(FromWorker.READY)
if os.fork() == 0:
    channel.channel.close()
    while os.getppid() != supervisor_id: time.sleep(0.01)
    os.write(2, b'orphan %d\\n' % os.getpid())
    os._exit(0)
os._exit(3)
"""
    # PR_SET_CHILD_SUBREAPER makes it in this what process 1 is.
    setup = """
import ctypes
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
supervisor_id = os.getpid()
"""
    async with running_process(*command(main, 1, setup=setup)) as process:
        for _ in range(2):
            found = await process.wait_for_output(r"orphan (\d+)")
            process.said = ""
            await until(partial(_is_gone, found[1]))
        process.signal(signal.SIGTERM)
        status, out, _ = await process.end()
    assert (status, out) == (0, "dropped 0\n")


# ----------------------------------------------------------------------------------- the supervisor


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
