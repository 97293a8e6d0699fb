"""Signals as events of a selector loop, and those that do nothing."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
IGNORED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""By default they end a process at once. Other servers reopen logs or start a new binary."""
HANDLED_SIGNALS = (*STOP_SIGNALS, *IGNORED_SIGNALS, signal.SIGHUP, signal.SIGCHLD)

_log = logging.getLogger("tensorgate")


def log_ignored(number: int) -> None:
    """Log that a signal did nothing, and which ones do what it may have been sent for."""
    name = signal.Signals(number).name
    _log.warning(
        "%s is ignored: SIGHUP reads the settings again and opens the access log anew, SIGTERM"
        " finishes the calls in progress and stops",
        name,
    )


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
        """Return the signals since the last call; log those that are ignored."""
        try:
            received = set(self._receiver.recv(64))
        except BlockingIOError:
            return set()
        for number in received.intersection(IGNORED_SIGNALS):
            log_ignored(number)
        return received.difference(IGNORED_SIGNALS)

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
        """Restore the default actions in a forked child, but ignore what would end it needlessly.

        Signals must be blocked meanwhile: the wakeup socket is still the parent's.
        """
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for number in (*IGNORED_SIGNALS, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._receiver.close()
        self._sender.close()
