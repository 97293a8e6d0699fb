"""Opens the TCP and Unix sockets that the gateway listens on."""

from __future__ import annotations

import os
import socket
import stat

_BACKLOG = 4096
"""Connections that may wait to be accepted; Linux caps it at net.core.somaxconn (4,096)."""


def open_tcp_sockets(host: str, port: int) -> list[socket.socket]:
    """Listen on each address of a host; with port 0 the system chooses the port.

    Raises OSError if one of them is not available.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # All addresses get the port of the first one.
            sock.bind((address[0], sockets[0].getsockname()[1] or port, *address[2:]))
            sock.listen(_BACKLOG)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def open_unix_socket(path: str) -> socket.socket:
    """Listen on a Unix socket; it replaces the stale socket of a process that has ended.

    Raises OSError if the path is another kind of file, or a socket in use.
    """
    if os.path.exists(path):
        _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(0, f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(0, f"{path} is in use by another process")
