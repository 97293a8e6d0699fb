"""The Forwarded header: what a proxy tells servers about its client, as RFC 7239 has it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final

# RFC 9110, section 5.6.2.
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a client's connection.

    ``address`` is an IP address as text. It is None on a Unix socket (``is_unix``), or if the
    client disconnected before its address was read.
    """

    address: str | None = None
    is_unix: bool = False
    is_tls: bool = False

    @property
    def scheme(self) -> str:
        """Return the scheme of the client's URLs."""
        return "https" if self.is_tls else "http"


def forwarded_element(peer: Peer, host: str) -> str:
    """Write the element of one proxy in Forwarded: RFC 7239, section 4."""
    pairs = {"for": _node(peer), "host": host, "proto": peer.scheme}
    return ";".join(f"{name}={_value(value)}" for name, value in pairs.items() if value)


def _node(peer: Peer) -> str:
    """Write a node identifier: RFC 7239, section 6."""
    if peer.address is None:
        return "unknown"
    is_ipv6 = isinstance(ip_address(peer.address), IPv6Address)
    return f"[{peer.address}]" if is_ipv6 else peer.address


def _value(text: str) -> str:
    if _TOKEN.fullmatch(text):
        return text
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'
