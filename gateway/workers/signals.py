"""Signals as something that a loop waits for, like what comes on its sockets."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HANDLED_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD)


class Signals:
    """Hears of signals, while its context is open, between two turns of a loop."""

    def __init__(self) -> None:
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)

    def fileno(self) -> int:
        """Give what is readable when there are signals."""
        return self._ear.fileno()

    def heard(self) -> set[int]:
        """Give those that have come."""
        try:
            return set(self._ear.recv(64))
        except BlockingIOError:
            return set()

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Hear of signals, instead of what they would do else."""
        signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda *_: None) for number in HANDLED_SIGNALS}
        with self._ear, self._mouth:
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(-1)

    def leave(self) -> None:
        """Leave in a child what is the parent's; what makes that read its settings means nothing.

        Signals must be blocked meanwhile, else they would be told to the parent.
        """
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._ear.close()
        self._mouth.close()
