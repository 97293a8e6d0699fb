"""Settings → the listening sockets."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from gateway.listener.sockets import open_tcp_sockets, open_unix_socket
from gateway.settings.schema import Settings
from gateway.settings.values.addresses import Address, TcpAddress, UnixAddress


class UnusableSettingsError(Exception):
    """What the settings name, but cannot be used: an address, a certificate, a file of API keys.

    The message names it.
    """


_WILDCARDS = ("0.0.0.0", "::")
_NEEDS_RESTART = "such a change takes a restart"
_NEVER_TOGETHER = "the two cannot be had together"


class BoundAddress(NamedTuple):
    """An address, the sockets that are bound to it, and whether operators connect there."""

    address: Address
    sockets: tuple[socket.socket, ...]
    is_admin: bool = False


def listen(
    clients: Sequence[Address],
    operators: Address | None = None,
    before: Sequence[BoundAddress] = (),
    *,
    rebinds: bool = False,
) -> tuple[BoundAddress, ...]:
    """Listen on all addresses, or on no new one. Raises UnusableSettingsError.

    Addresses that were bound ``before`` keep their sockets; those that are gone stay open. With
    ``rebinds``, an address that clients and operators swap gets duplicates of its sockets, which
    share the queue: so another listener serves the clients that wait there.
    """
    addresses = clients if operators is None else (*clients, operators)
    unused = list(before)
    bound: list[BoundAddress] = []
    opened: list[BoundAddress] = []
    try:
        for address in addresses:
            is_admin = address == operators
            kept = next((each for each in unused if each.address == address), None)
            if kept is not None:
                unused.remove(kept)
            if kept is None or (rebinds and kept.is_admin is not is_admin):
                kept = BoundAddress(address, _open_sockets(address, kept))
                opened.append(kept)
            bound.append(kept._replace(is_admin=is_admin))
    except OSError as error:
        message = f"cannot listen on {address}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            message += _own_conflict(address, addresses, (*before, *opened))
        close(opened)
        raise UnusableSettingsError(message) from error
    return tuple(bound)


def close(bound: Iterable[BoundAddress]) -> None:
    """Close the sockets, those of them that are still open."""
    for each in bound:
        for sock in each.sockets:
            sock.close()


def difference(bound: Iterable[BoundAddress], others: Iterable[BoundAddress]) -> list[BoundAddress]:
    """Return the bound addresses whose sockets are not among those of others."""
    known = [each.sockets for each in others]
    return [each for each in bound if each.sockets not in known]


def _open_sockets(address: Address, before: BoundAddress | None) -> tuple[socket.socket, ...]:
    if before is not None:
        return tuple(sock.dup() for sock in before.sockets)
    if isinstance(address, UnixAddress):
        return (open_unix_socket(address.path),)
    return tuple(open_tcp_sockets(address.host, address.port))


def _own_conflict(
    address: Address, wanted: Collection[Address], own: Iterable[BoundAddress]
) -> str:
    """Name the gateway's own address that another one conflicts with, if there is one."""
    for each in own:
        for sock in each.sockets:
            if _overlap(address, sock):
                rest = _NEVER_TOGETHER if each.address in wanted else _NEEDS_RESTART
                return f" by {TcpAddress(*sock.getsockname()[:2])} of the gateway itself: {rest}"
    return ""


def _overlap(address: Address, sock: socket.socket) -> bool:
    """Tell whether a listening socket has the port of an address, and one of its hosts."""
    if not isinstance(address, TcpAddress) or sock.family == socket.AF_UNIX:
        return False
    host, port = sock.getsockname()[:2]
    if port != address.port:
        return False
    try:
        found = socket.getaddrinfo(address.host, port, sock.family, socket.SOCK_STREAM)
    except OSError:  # the host has no address of this family
        return False
    return any(host in (each[4][0], *_WILDCARDS) or each[4][0] in _WILDCARDS for each in found)


def describe(bound: Iterable[BoundAddress], settings: Settings) -> list[str]:
    """Return where clients and operators connect: URLs, or unix:/path."""
    return [
        f"{_describe(sock, False)} (admin)"
        if each.is_admin
        else _describe(sock, settings.tls is not None)
        for each in bound
        for sock in each.sockets
    ]


def _describe(sock: socket.socket, is_tls: bool) -> str:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{'https' if is_tls else 'http'}://{host}:{name[1]}"
