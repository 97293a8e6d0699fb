"""The last connections of a listening socket, before it is closed."""

from __future__ import annotations

import socket
from collections.abc import Iterator


def last_connections(listening: socket.socket) -> Iterator[socket.socket]:
    """Give the connections that wait in the system's queue; the socket must not block.

    Closing the socket would reset them, though their clients may have sent a request.
    """
    while True:
        try:
            yield listening.accept()[0]
        except ConnectionAbortedError:
            continue
        except OSError:  # there are no more, or none can be had
            return
