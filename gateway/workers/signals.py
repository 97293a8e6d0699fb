"""Signals as events of a selector loop."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HANDLED_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD)


class SignalWatcher:
    """Makes a socket readable when a signal comes, instead of what the signal does by default."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._receiver.fileno()

    def received(self) -> set[int]:
        """Return the signals since the last call."""
        try:
            return set(self._receiver.recv(64))
        except BlockingIOError:
            return set()

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle the signals while the context is open."""
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda *_: None) for number in HANDLED_SIGNALS}
        with self._receiver, self._sender:
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(-1)

    def reset_in_child(self) -> None:
        """Restore the default actions in a forked child, but ignore SIGHUP.

        Signals must be blocked meanwhile: the wakeup socket is still the parent's.
        """
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._receiver.close()
        self._sender.close()
