"""Accepts the connections that wait at a listening socket, in bounded batches."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

MAX_BATCH = 256
"""Connections that are accepted in one time slice of the event loop, which takes some 10 ms. Open
connections are served before the next batch."""
_ERROR_DELAY = 1.0
"""Seconds without accepting after an error, such as too many open files."""

# accept(2): Linux reports pending errors of the new connection; the next one may be fine.
_ERRORS_OF_A_CONNECTION = frozenset(
    (
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENONET,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EPROTO,
    )
)

_log = logging.getLogger("tensorgate.listener")


class AcceptingSocket:
    """Accepts at a listening socket, which it owns, until it is closed.

    Each connection goes to ``on_connection``, which must not raise or close this. The servers of
    event loops have no such bound: libuv accepts one connection in a time slice, and asyncio as
    many as the accept queue may hold.
    """

    def __init__(self, sock: socket.socket, on_connection: Callable[[socket.socket], None]) -> None:
        self._socket = sock
        self._on_connection = on_connection
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._start()

    def close(self) -> None:
        """Close the socket at once."""
        if self._pause is None:
            self._loop.remove_reader(self._socket)
        else:
            self._pause.cancel()
        self._socket.close()

    def _start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._accept_batch)

    def _accept_batch(self) -> None:
        for _ in range(MAX_BATCH):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _ERRORS_OF_A_CONNECTION:
                    continue
                _log.error("cannot accept a connection: %s", error.strerror or error)
                # The socket stays readable, and the loop would do nothing else.
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(_ERROR_DELAY, self._start)
                return
            self._on_connection(connection)
