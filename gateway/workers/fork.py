"""How a worker begins: as a copy of its parent that leaves all but its work."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from gateway.workers.ipc import WorkerChannel
from gateway.workers.signals import HANDLED_SIGNALS

_log = logging.getLogger("tensorgate.workers")

WorkerMain = Callable[[WorkerChannel], None]
"""What a worker does; it ends when its post says that no more connections come."""


def fork(
    work: WorkerMain, closed: memoryview, first: bool, leave: Callable[[], None]
) -> tuple[int, socket.socket]:
    """Start a worker; give its process' id, and the parent's end of the channel to it.

    ``closed`` is what they share; ``first`` is whether its seat is. ``leave`` closes what is the
    parent's, and gives signals up. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    # Until the child has left the handlers, a signal to it would be told to the parent.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            ours.close()
            _become_worker(work, WorkerChannel(theirs, closed, first), leave, before)
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return pid, ours


def _become_worker(
    work: WorkerMain,
    post: WorkerChannel,
    leave: Callable[[], None],
    mask: set[signal.Signals | int],
) -> NoReturn:
    """Leave all that is the parent's, and work; nothing else of the parent's code is run."""
    status = 1
    try:
        leave()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work(post)
        status = 0
    except BaseException:
        _log.exception("a worker failed")
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)
