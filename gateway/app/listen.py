"""The addresses that are listened on."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from gateway.listener.sockets import tcp_sockets, unix_socket
from gateway.settings.addresses import Address, UnixAddress
from gateway.settings.schema import Settings


class ListenError(Exception):
    """An address that cannot be listened on, or a file needed for that; the message names it."""


@dataclass(frozen=True, slots=True)
class Listening:
    """An address, and the sockets that listen there."""

    address: Address
    sockets: tuple[socket.socket, ...]


def addresses_of(settings: Settings) -> tuple[Address, ...]:
    """Give all addresses to listen on: those of clients, and that of operators."""
    return settings.listen if settings.admin is None else (*settings.listen, settings.admin)


def listen(
    addresses: Sequence[Address],
    before: Iterable[Listening] = (),
    anew: Collection[Address | None] = (),
) -> tuple[Listening, ...]:
    """Listen on all addresses, or on none that is new. Raises ListenError.

    Those that are listened on before stay as they are, and those not wanted any more open. Where
    that is to be done ``anew``, there are sockets of their own for those who wait there already.
    """
    left = list(before)
    listening: list[Listening] = []
    opened: list[Listening] = []
    try:
        for address in addresses:
            kept = next((each for each in left if each.address == address), None)
            if kept is not None:
                left.remove(kept)
            if kept is None or address in anew:
                kept = Listening(address, _listen_on(address, kept))
                opened.append(kept)
            listening.append(kept)
    except ListenError:
        close(opened)
        raise
    return tuple(listening)


def close(listening: Iterable[Listening]) -> None:
    """Listen no more; what a server has closed already stays so."""
    for sock in sockets_of(listening):
        sock.close()


def sockets_of(listening: Iterable[Listening]) -> list[socket.socket]:
    """Give all sockets, in order."""
    return [sock for each in listening for sock in each.sockets]


def without(listening: Iterable[Listening], others: Iterable[Listening]) -> list[Listening]:
    """Give those that are not among others."""
    others = tuple(others)
    return [each for each in listening if not any(each is other for other in others)]


def _listen_on(address: Address, before: Listening | None) -> tuple[socket.socket, ...]:
    try:
        if before is not None:
            return tuple(sock.dup() for sock in before.sockets)
        if isinstance(address, UnixAddress):
            return (unix_socket(address.path),)
        return tuple(tcp_sockets(address.host, address.port))
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {error.strerror or error}") from error


def shown(listening: Iterable[Listening], settings: Settings) -> list[str]:
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
