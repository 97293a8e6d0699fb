"""The addresses that are listened on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from gateway.listener.sockets import open_tcp_sockets, open_unix_socket
from gateway.settings.schema import Settings
from gateway.settings.values.addresses import Address, TcpAddress, UnixAddress


class ListenError(Exception):
    """An address that cannot be listened on, or a file needed for that; the message names it."""


_EVERY = ("0.0.0.0", "::")
"""The addresses that stand for all of a machine's."""
_RESTART = "such a change takes a restart"
_TOGETHER = "the two cannot be had together"


@dataclass(frozen=True, slots=True)
class BoundAddress:
    """An address, and the sockets that listen there."""

    address: Address
    sockets: tuple[socket.socket, ...]


def listen_addresses(settings: Settings) -> tuple[Address, ...]:
    """Give all addresses to listen on: those of clients, and that of operators."""
    return settings.listen if settings.admin is None else (*settings.listen, settings.admin)


def listen(
    addresses: Sequence[Address],
    before: Iterable[BoundAddress] = (),
    anew: Collection[Address | None] = (),
) -> tuple[BoundAddress, ...]:
    """Listen on all addresses, or on none that is new. Raises ListenError.

    Those that are listened on before stay as they are, and those not wanted any more open. Where
    that is to be done ``anew``, there are sockets of their own for those who wait there already.
    """
    before = tuple(before)
    left = list(before)
    listening: list[BoundAddress] = []
    opened: list[BoundAddress] = []
    try:
        for address in addresses:
            kept = next((each for each in left if each.address == address), None)
            if kept is not None:
                left.remove(kept)
            if kept is None or address in anew:
                kept = BoundAddress(address, _listen_on(address, kept))
                opened.append(kept)
            listening.append(kept)
    except OSError as error:
        fault = f"cannot listen on {address}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            fault += _by_itself(address, addresses, (*before, *opened))
        close(opened)
        raise ListenError(fault) from error
    return tuple(listening)


def close(listening: Iterable[BoundAddress]) -> None:
    """Listen no more; what a server has closed already stays so."""
    for sock in all_sockets(listening):
        sock.close()


def all_sockets(listening: Iterable[BoundAddress]) -> list[socket.socket]:
    """Give all sockets, in order."""
    return [sock for each in listening for sock in each.sockets]


def without(
    listening: Iterable[BoundAddress], others: Iterable[BoundAddress]
) -> list[BoundAddress]:
    """Give those that are not among others."""
    others = tuple(others)
    return [each for each in listening if not any(each is other for other in others)]


def _listen_on(address: Address, before: BoundAddress | None) -> tuple[socket.socket, ...]:
    if before is not None:
        return tuple(sock.dup() for sock in before.sockets)
    if isinstance(address, UnixAddress):
        return (open_unix_socket(address.path),)
    return tuple(open_tcp_sockets(address.host, address.port))


def _by_itself(address: Address, wanted: Collection[Address], own: Iterable[BoundAddress]) -> str:
    """Tell which address of the gateway itself is in the way of another, if one is."""
    for each in own:
        for sock in each.sockets:
            if _share(address, sock):
                rest = _TOGETHER if each.address in wanted else _RESTART
                return f" by {TcpAddress(*sock.getsockname()[:2])} of the gateway itself: {rest}"
    return ""


def _share(address: Address, sock: socket.socket) -> bool:
    """Tell whether a host of an address, and the port, are also a listening socket's."""
    if not isinstance(address, TcpAddress) or sock.family == socket.AF_UNIX:
        return False
    host, port = sock.getsockname()[:2]
    if port != address.port:
        return False
    try:
        found = socket.getaddrinfo(address.host, port, sock.family, socket.SOCK_STREAM)
    except OSError:  # it has none of this family
        return False
    return any(host in (each[4][0], *_EVERY) or each[4][0] in _EVERY for each in found)


def shown(listening: Iterable[BoundAddress], settings: Settings) -> list[str]:
    """Tell where clients reach listening sockets: URLs, or unix:/path; and where operators do."""
    return [
        f"{_shown(sock, False)} (admin)"
        if each.address == settings.admin
        else _shown(sock, settings.tls is not None)
        for each in listening
        for sock in each.sockets
    ]


def _shown(sock: socket.socket, is_tls: bool) -> str:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{'https' if is_tls else 'http'}://{host}:{name[1]}"
