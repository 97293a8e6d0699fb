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
_ERROR_DELAY = 1.0
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


def _no_room() -> bool:
    """Make no room."""
    return False


class AcceptingSocket:
    """Accepts at a listening socket, which it owns, until it is closed.

    Each connection goes to ``on_connection``, which must not raise or close this. The servers of
    event loops have no such bound: libuv accepts one connection in a time slice, and asyncio as
    many as the accept queue may hold. If descriptors run out, ``make_room`` closes other
    connections, and returns whether it has.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_connection: Callable[[socket.socket], None],
        make_room: Callable[[], bool] = _no_room,
    ) -> None:
        self._socket = sock
        self._on_connection = on_connection
        self._make_room = make_room
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
                delay = _ERROR_DELAY
                if error.errno in _NO_DESCRIPTORS and self._make_room():
                    delay = _ROOM_DELAY
                else:
                    _log.error("cannot accept a connection: %s", error.strerror or error)
                # The socket stays readable, and the loop would do nothing else.
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(delay, self._start)
                return
            self._on_connection(connection)


class AcceptingSockets:
    """Accepts at several listening sockets, which it owns; each connection goes to ``adopt``."""

    def __init__(self, adopt: Callable[[socket.socket], None]) -> None:
        self._adopt = adopt
        self.make_room: Callable[[], bool] = _no_room
        """Closes connections if descriptors run out; see AcceptingSocket."""
        self._sockets: dict[socket.socket, AcceptingSocket] = {}

    def listen(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket, and own it from now on."""
        self._sockets[sock] = AcceptingSocket(sock, self._adopt, lambda: self.make_room())

    async def stop_all(self, max_wait: float) -> None:
        """Stop accepting on all sockets, as ``stop_listening`` does."""
        await self.stop_listening(tuple(self._sockets), max_wait)

    async def stop_listening(
        self, sockets: Collection[socket.socket], max_wait: float = HANDSHAKE_TIMEOUT
    ) -> None:
        """Stop accepting on sockets, and close them; connections in their queues are served.

        A TCP handshake in progress has at most ``max_wait`` seconds to complete.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + min(HANDSHAKE_TIMEOUT, max_wait)
        for sock in sockets:
            drop_new_connections(sock)
        while sockets and loop.time() < until:
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
            self._sockets.pop(sock).close()
