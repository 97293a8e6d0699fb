"""Finds endpoints that are the gateway itself, as far as the settings show it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from gateway.settings.schema import Settings
from gateway.settings.upstreams import urls_of
from gateway.settings.values.addresses import Address, UnixAddress, address_of
from gateway.settings.values.wording import KeyPath, format_path
from gateway.settings.yaml.loader import Position

_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class SelfReference:
    """An endpoint that leads to an address on which the gateway listens."""

    path: KeyPath
    endpoint: str
    listen: Address
    listen_path: KeyPath

    def describe(self, file: Path, positions: Mapping[KeyPath, Position]) -> str:
        """Return the warning, with the lines of both settings, if they are known."""
        line, listen_line = _line(self.path, positions), _line(self.listen_path, positions)
        place = f"{file}:{line}" if line else f"{file}"
        where = f"listen, line {listen_line}" if listen_line else "listen"
        return (
            f"{place}: {format_path(self.path)}: warning: {self.endpoint} is the gateway itself"
            f" ({where}: {self.listen}); requests come back and are answered with 508"
        )


def find_self_references(settings: Settings) -> Iterator[SelfReference]:
    """Yield the endpoints at which the gateway itself listens, without DNS lookups."""
    for name, upstream in settings.upstreams.items():
        for i, endpoint in enumerate(upstream.endpoints):
            for url in urls_of(endpoint):
                for j, listen in enumerate(settings.listen):
                    if _leads_to(address_of(url), listen):
                        path = ("upstreams", name, "endpoints", i)
                        yield SelfReference(path, url, listen, ("listen", j))
                        break


def _leads_to(endpoint: Address, listen: Address) -> bool:
    """Tell whether a connection to an endpoint reaches a listening address."""
    if isinstance(endpoint, UnixAddress) or isinstance(listen, UnixAddress):
        return endpoint == listen
    if endpoint.port != listen.port:
        return False
    if _same_host(endpoint.host, listen.host):
        return True
    if listen.host in _WILDCARDS:
        version = 6 if listen.host == "::" else 4
        return _is_this_machine(endpoint.host, version)
    # A connection to 0.0.0.0 goes to the loopback interface.
    return _is_loopback(listen.host) and (
        endpoint.host in _WILDCARDS or _is_localhost(endpoint.host)
    )


def _same_host(one: str, other: str) -> bool:
    return one.lower().rstrip(".") == other.lower().rstrip(".")


def _is_this_machine(host: str, version: int) -> bool:
    """Tell whether a host is this machine; an address must have this version of IP."""
    if _is_localhost(host) or _same_host(host, socket.gethostname()):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.version == version and (address.is_loopback or _can_be_bound(host, version))


def _is_localhost(host: str) -> bool:
    return _same_host(host, "localhost")


def _is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "::1") or _is_localhost(host)


def _can_be_bound(host: str, version: int) -> bool:
    """Tell whether an address is one of this machine's."""
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    try:
        with socket.socket(family) as sock:
            sock.bind((host, 0))
    except OSError:
        return False
    return True


def _line(path: KeyPath, positions: Mapping[KeyPath, Position]) -> int | None:
    prefixes = (path[:length] for length in range(len(path), 0, -1))
    position = next((positions[each] for each in prefixes if each in positions), None)
    return None if position is None else position.line
