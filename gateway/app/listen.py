"""The addresses that are listened on."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from gateway.listener.sockets import tcp_sockets, unix_socket
from gateway.settings.addresses import Address, UnixAddress


class ListenError(Exception):
    """An address that cannot be listened on, or a file needed for that; the message names it."""


def listen(addresses: Sequence[Address]) -> list[socket.socket]:
    """Listen on all addresses, or on none. Raises ListenError."""
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            sockets += _listen_on(address)
    except ListenError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _listen_on(address: Address) -> list[socket.socket]:
    try:
        if isinstance(address, UnixAddress):
            return [unix_socket(address.path)]
        return tcp_sockets(address.host, address.port)
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {error.strerror or error}") from error


def shown(sock: socket.socket, is_tls: bool = False) -> str:
    """Tell where clients reach a listening socket: a URL, or unix:/path."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{'https' if is_tls else 'http'}://{host}:{name[1]}"
