"""What servers are told of a request beside what the client says: who asks, and by which way."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address

from multidict import CIMultiDictProxy

from gateway.upstream.transport import HeaderLines

REQUEST_ID = "X-Request-Id"

Network = IPv4Network | IPv6Network

_FOR, _PROTO, _HOST = "X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host"
_FORWARDED, _VIA = "Forwarded", "Via"
_CDN_LOOP = "CDN-Loop"
_PSEUDONYM = "tensorgate"

_IDENTITY_BYTES = 8
_ID_BYTES = 16
_AHEAD = 256
"""Ids that are made at once: to ask the system for each costs 3 µs, for many next to nothing."""
_unused: list[str] = []
# Two processes must not use the same.
os.register_at_fork(after_in_child=_unused.clear)

# What stands in a line of the log between spaces.
_SANE_ID = re.compile(r"[!-~]{1,128}")
# RFC 9110, section 5.6.2.
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection.

    ``address`` is an IP address as text, None where there is none: on a Unix socket (``is_unix``),
    or where the client was gone before it could be asked for.
    """

    address: str | None = None
    is_unix: bool = False
    is_tls: bool = False


@dataclass(frozen=True, slots=True)
class ForwardedPolicy:
    """Say what servers are told.

    ``headers`` is for X-Forwarded-For, -Proto and -Host, and for Forwarded where it is in use. What
    a client says in them is kept, and added to, if its address is in a ``trusted`` network or it
    comes by a Unix socket, and else replaced. ``identity`` is what tells this gateway from all
    others: with it, a request that comes back is recognized.
    """

    headers: bool
    trusted: tuple[Network, ...]
    via: bool
    request_id: bool
    identity: str = ""

    @property
    def replaced_headers(self) -> frozenset[str]:
        """Name, in lower case, the client's headers that those made here take the place of."""
        names = [_FOR, _PROTO, _HOST, _FORWARDED] if self.headers else []
        names += [name for name, _ in self.own_request_headers]
        names += [REQUEST_ID] if self.request_id else []
        return frozenset(name.lower() for name in names)

    @property
    def pseudonym(self) -> str:
        """Give the name of this gateway among the proxies of a request."""
        return f"{_PSEUDONYM}-{self.identity}" if self.identity else _PSEUDONYM

    @property
    def own_request_headers(self) -> HeaderLines:
        """Give the header that names this gateway, as a request that it makes itself has it.

        Without Via, which some servers take for a reason not to compress, CDN-Loop does it: a
        header that has no other use (RFC 8586, section 2).
        """
        if self.via:
            return ((_VIA, f"1.1 {self.pseudonym}"),)
        return ((_CDN_LOOP, self.pseudonym),) if self.identity else ()

    def is_loop(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request has been through this gateway before."""
        if not self.identity:
            return False
        name = _VIA if self.via else _CDN_LOOP
        # The identity is random: what contains it names this gateway.
        return name in headers and any(self.pseudonym in each for each in headers.getall(name))

    def trusts(self, peer: Peer) -> bool:
        """Tell whether what a peer says of those before it is to be believed."""
        if peer.address is None:
            return peer.is_unix
        address = ip_address(peer.address)
        return any(address in network for network in self.trusted)


NO_FORWARDED_HEADERS = ForwardedPolicy(headers=False, trusted=(), via=False, request_id=False)
"""Servers are told what the client says, and no more."""


class ForwardedHeaders:
    """Makes the headers that go to servers beside the client's, for the requests of a connection.

    Requests with the same head differ in their id alone.
    """

    def __init__(self, forwarding: ForwardedPolicy, peer: Peer) -> None:
        self.forwarding = forwarding
        self._peer = peer
        self._gives_ids = forwarding.request_id
        self._trusted = forwarding.headers and forwarding.trusts(peer)
        self._from_peer = _lines((_FOR, peer.address or ""), (_PROTO, _scheme(peer)))
        self._headers: CIMultiDictProxy[str] | None = None
        self._lines: HeaderLines = ()
        self._given_id: str | None = None

    def of(self, headers: CIMultiDictProxy[str], version: str) -> tuple[HeaderLines, str]:
        """Give the headers for the next request, and its id, which is empty where none is given.

        ``version`` is that of the request's HTTP: 1.1, or 1.0.
        """
        if headers is not self._headers:
            self._headers = headers
            self._lines = self._make(headers, version)
            self._given_id = _sane_id(headers)
        if not self._gives_ids:
            return self._lines, ""
        request_id = self._given_id or _new_id()
        return (*self._lines, (REQUEST_ID, request_id)), request_id

    def _make(self, headers: CIMultiDictProxy[str], version: str) -> HeaderLines:
        lines: HeaderLines = ()
        if self.forwarding.headers:
            lines = self._way(headers)
            if _FORWARDED in headers:
                element = forwarded_element(self._peer, headers.get("Host", ""))
                said = _appended(headers, _FORWARDED, element) if self._trusted else element
                lines += ((_FORWARDED, said),)
        if self.forwarding.via:
            # RFC 9110, section 7.6.3: a gateway must on requests, and may on answers.
            said = f"{version} {self.forwarding.pseudonym}"
            lines += ((_VIA, _appended(headers, _VIA, said)),)
        elif self.forwarding.identity:
            said = self.forwarding.pseudonym
            lines += ((_CDN_LOOP, _appended(headers, _CDN_LOOP, said)),)
        return lines

    def _way(self, headers: CIMultiDictProxy[str]) -> HeaderLines:
        """Give the lines of X-Forwarded: what the client says of them, if it is to be believed."""
        host = headers.get("Host", "")
        if not self._trusted:
            return self._from_peer + _lines((_HOST, host))
        return _lines(
            (_FOR, _appended(headers, _FOR, self._peer.address or "")),
            (_PROTO, headers.get(_PROTO) or _scheme(self._peer)),
            (_HOST, headers.get(_HOST) or host),
        )


def new_identity() -> str:
    """Make what tells one gateway from all others, as part of a token (RFC 9110, 5.6.2)."""
    return secrets.token_hex(_IDENTITY_BYTES)


def forwarded_element(peer: Peer, host: str) -> str:
    """Write what one proxy says in Forwarded: RFC 7239, section 4."""
    pairs = {"for": _node(peer), "host": host, "proto": _scheme(peer)}
    return ";".join(f"{name}={_value(value)}" for name, value in pairs.items() if value)


def _node(peer: Peer) -> str:
    """Name a client: RFC 7239, section 6."""
    if peer.address is None:
        return "unknown"
    is_ipv6 = isinstance(ip_address(peer.address), IPv6Address)
    return f"[{peer.address}]" if is_ipv6 else peer.address


def _value(text: str) -> str:
    if _TOKEN.fullmatch(text):
        return text
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def _lines(*lines: tuple[str, str]) -> HeaderLines:
    """Give the lines that say something."""
    return tuple([line for line in lines if line[1]])


def _scheme(peer: Peer) -> str:
    return "https" if peer.is_tls else "http"


def _appended(headers: CIMultiDictProxy[str], name: str, value: str) -> str:
    """Add to the end of a header's list, which may be spread over several lines."""
    if name not in headers:
        return value
    return ", ".join([each for each in (*headers.getall(name), value) if each])


def _new_id() -> str:
    """Give an id that no other process has, and that nobody can guess."""
    if not _unused:
        digits = os.urandom(_AHEAD * _ID_BYTES).hex()
        size = 2 * _ID_BYTES
        _unused.extend(digits[at : at + size] for at in range(0, len(digits), size))
    return _unused.pop()


def _sane_id(headers: CIMultiDictProxy[str]) -> str | None:
    """Give the id that a client gave its request, if it is one, and such as can be logged."""
    if REQUEST_ID not in headers:
        return None
    given = headers.getall(REQUEST_ID)
    return given[0] if len(given) == 1 and _SANE_ID.fullmatch(given[0]) else None
