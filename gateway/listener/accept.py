"""Accepts the connections that wait at listening sockets, in bounded batches."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Collection

from gateway.system.accept_queue import (
    HANDSHAKE_POLL_INTERVAL,
    HANDSHAKE_TIMEOUT,
    drain_accept_queue,
    drop_new_connections,
    has_pending_handshakes,
)

MAX_BATCH = 256
"""Connections that are accepted in one time slice of the event loop, which takes some 10 ms. Open
connections are served before the next batch."""
ERROR_DELAY = 1.0
"""Seconds without accepting after an error, such as too many open files."""
_ROOM_DELAY = 0.05
"""The same after room was made: the descriptors are free once their transports have closed."""
_NO_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE))

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


class AcceptingSockets:
    """Accepts at several listening sockets, which it owns; each connection goes to ``adopt``.

    That must not raise or close a socket. The servers of event loops accept without such a bound:
    libuv one connection in a time slice, and asyncio as many as the accept queue may hold.
    """

    def __init__(
        self, adopt: Callable[[socket.socket], None], make_room: Callable[[], bool] = lambda: False
    ) -> None:
        self._adopt = adopt
        self.make_room = make_room
        """Closes connections if descriptors run out; tells whether it has."""
        self._loop = asyncio.get_running_loop()
        self._sockets: dict[socket.socket, asyncio.TimerHandle | None] = {}
        """Each with the timer of its pause."""

    def listen(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket, and own it from now on."""
        sock.setblocking(False)
        self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        self._sockets[sock] = None
        self._loop.add_reader(sock, self._accept_batch, sock)

    def _accept_batch(self, sock: socket.socket) -> None:
        for _ in range(MAX_BATCH):
            try:
                connection, _ = sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _ERRORS_OF_A_CONNECTION:
                    continue
                delay = ERROR_DELAY
                if error.errno in _NO_DESCRIPTORS and self.make_room():
                    delay = _ROOM_DELAY
                else:
                    _log.error("cannot accept a connection: %s", error.strerror or error)
                # The socket stays readable, and the loop would do nothing else.
                self._loop.remove_reader(sock)
                self._sockets[sock] = self._loop.call_later(delay, self._start, sock)
                return
            self._adopt(connection)

    async def stop_all(self, max_wait: float) -> None:
        """Stop accepting on all sockets, as ``stop_listening`` does."""
        await self.stop_listening(tuple(self._sockets), max_wait)

    async def stop_listening(
        self, sockets: Collection[socket.socket], max_wait: float = HANDSHAKE_TIMEOUT
    ) -> None:
        """Stop accepting on sockets, and close them; connections in their queues are served.

        A TCP handshake in progress has at most ``max_wait`` seconds to complete.
        """
        until = self._loop.time() + min(HANDSHAKE_TIMEOUT, max_wait)
        for sock in sockets:
            drop_new_connections(sock)
        while sockets and self._loop.time() < until:
            await asyncio.sleep(HANDSHAKE_POLL_INTERVAL)
            if not any(map(has_pending_handshakes, sockets)):
                break
        for sock in sockets:
            for connection in drain_accept_queue(sock):
                self._adopt(connection)
        self.close_sockets(sockets)

    def close_sockets(self, sockets: Collection[socket.socket]) -> None:
        """Close listening sockets at once; their queues go to duplicates of the sockets, if any."""
        for sock in self._sockets.keys() & set(sockets):
            pause = self._sockets.pop(sock)
            if pause is None:
                self._loop.remove_reader(sock)
            else:
                pause.cancel()
            sock.close()
