"""How the supervisor accepts: without descriptors, and while the gateway stops."""

import selectors
import signal
import socket
import time
from collections import deque
from typing import cast

import pytest

from gateway.workers.acceptor import Acceptor
from gateway.workers.ipc import ToWorker
from gateway.workers.worker_pool import WorkerPool, WorkerProcess, WorkerState
from tests.support.checks.descriptors import no_descriptors
from tests.support.gateway_process import running_process
from tests.workers.programs import COUNTING_WORKER, command


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
