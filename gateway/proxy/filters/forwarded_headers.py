"""Headers that the gateway adds for servers: forwarded address, Via, loop detection, request id."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final

from multidict import CIMultiDictProxy

from gateway.http1.forwarded import Peer as Peer
from gateway.http1.forwarded import forwarded_element
from gateway.http1.head import RequestHead
from gateway.observe.call_trace import TRACE_HEADERS
from gateway.protocol.grpc.headers import TIMEOUT
from gateway.upstream.transport import HeaderLines

REQUEST_ID: Final = "X-Request-Id"

Network = IPv4Network | IPv6Network

_FOR, _PROTO, _HOST = "X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host"
_FORWARDED, _VIA = "Forwarded", "Via"
_CDN_LOOP: Final = "CDN-Loop"
_PSEUDONYM: Final = "tensorgate"

_FORWARDED_NAMES: Final = frozenset(name.lower() for name in (_FOR, _PROTO, _HOST, _FORWARDED))

NOTED_HEADERS: Final = (
    _FORWARDED_NAMES | TRACE_HEADERS | {REQUEST_ID.lower(), "content-length", TIMEOUT}
)
"""Headers, in lower case, that differ from request to request, and are read from each head."""

FORWARDED_KEYS: Final = frozenset(("host", _VIA.lower(), _CDN_LOOP.lower()))
"""Headers, in lower case, on which the added headers depend."""

_IDENTITY_BYTES: Final = 8
_ID_BYTES: Final = 16
_BATCH: Final = 256
"""Ids that are generated together: one urandom call for each id costs 3 µs."""
_unused_ids: list[str] = []
# Two processes must not use the same ids.
os.register_at_fork(after_in_child=_unused_ids.clear)

_MAX_ID: Final = 128
"""Maximum characters of a client's request id."""
_ID_CHARACTERS: Final = bytes(range(ord("!"), ord("~") + 1))
"""They fit between spaces in a log line."""


@dataclass(frozen=True, slots=True)
class ForwardedPolicy:
    """Which headers the gateway adds.

    ``headers`` switches X-Forwarded-For, -Proto and -Host, and Forwarded if the client uses it.
    Those of a client in a ``trusted`` network or on a Unix socket are extended, others are
    replaced. ``identity`` is unique to this gateway: with it, a request that comes back is
    recognized as a loop.
    """

    headers: bool
    trusted: tuple[Network, ...]
    via: bool
    request_id: bool
    identity: str = ""

    @property
    def replaced_headers(self) -> frozenset[str]:
        """Return the names, in lower case, of the client's headers that are replaced."""
        names = [_FOR, _PROTO, _HOST, _FORWARDED] if self.headers else []
        names += [name for name, _ in self.own_request_headers]
        names += [REQUEST_ID] if self.request_id else []
        return frozenset(name.lower() for name in names)

    @property
    def pseudonym(self) -> str:
        """Return the gateway's name in Via and CDN-Loop."""
        return f"{_PSEUDONYM}-{self.identity}" if self.identity else _PSEUDONYM

    @property
    def own_request_headers(self) -> HeaderLines:
        """Return the header that names the gateway in requests of its own.

        Some servers do not compress if there is a Via. Without it, CDN-Loop is used, which serves
        loop detection only (RFC 8586, section 2).
        """
        if self.via:
            return ((_VIA, f"1.1 {self.pseudonym}"),)
        return ((_CDN_LOOP, self.pseudonym),) if self.identity else ()

    def is_loop(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request has passed this gateway before."""
        if not self.identity:
            return False
        name = _VIA if self.via else _CDN_LOOP
        # The identity is random: a value that contains it names this gateway.
        return name in headers and any(self.pseudonym in each for each in headers.getall(name))

    def trusts(self, peer: Peer) -> bool:
        """Tell whether the forwarded headers of a peer are trusted."""
        if peer.address is None:
            return peer.is_unix
        address = ip_address(peer.address)
        return any(address in network for network in self.trusted)


NO_FORWARDED_HEADERS: Final = ForwardedPolicy(
    headers=False, trusted=(), via=False, request_id=False
)
"""Adds nothing."""


class ForwardedHeaders:
    """Makes the added headers for the requests of one connection.

    Most requests of a connection differ in the request id alone: the rest is made once.
    """

    def __init__(self, forwarding: ForwardedPolicy, peer: Peer, is_http2: bool = False) -> None:
        self.forwarding = forwarding
        self._peer = peer
        self._is_http2 = is_http2
        self._adds_request_id = forwarding.request_id
        self._trusted = forwarding.headers and forwarding.trusts(peer)
        self._peer_lines = _lines((_FOR, peer.address or ""), (_PROTO, peer.scheme))
        self._key: tuple[bytes, ...] = ()
        self._sources: list[bytes] = []
        """The client's lines on which the last headers depend."""
        self._headers: HeaderLines = ()
        self._encoded = b""

    def make(self, head: RequestHead) -> tuple[HeaderLines, bytes, str]:
        """Return the headers for the next request, their lines, and its request id.

        The id is empty if ids are off.
        """
        client_ids: list[str] = []
        is_forwarded = False
        for field in head.noted:
            name = field.lower
            if name == "x-request-id":
                client_ids.append(field.value)
            elif name in _FORWARDED_NAMES and (self._trusted or name == "forwarded"):
                is_forwarded = True
        if is_forwarded or head.key != self._key:
            # What another proxy tells of its clients differs from request to request.
            self._key = () if is_forwarded else head.key
            sources = [field.line for field in head.fields if field.lower in FORWARDED_KEYS]
            sources.append(b"1.0" if head.http_1_0 else b"")
            if is_forwarded or sources != self._sources:
                self._sources = [] if is_forwarded else sources
                version = "2.0" if self._is_http2 else "1.0" if head.http_1_0 else "1.1"
                self._headers = self._make_lines(head.headers, version)
                self._encoded = _encode(self._headers)
        if not self._adds_request_id:
            return self._headers, self._encoded, ""
        request_id = _valid_id(client_ids) or _new_id()
        line = f"{REQUEST_ID}: {request_id}\r\n".encode()
        return (*self._headers, (REQUEST_ID, request_id)), self._encoded + line, request_id

    def _make_lines(self, headers: CIMultiDictProxy[str], version: str) -> HeaderLines:
        lines: HeaderLines = ()
        if self.forwarding.headers:
            lines = self._x_forwarded(headers)
            if _FORWARDED in headers:
                element = forwarded_element(self._peer, headers.get("Host", ""))
                value = _appended(headers, _FORWARDED, element) if self._trusted else element
                lines += ((_FORWARDED, value),)
        if self.forwarding.via:
            # RFC 9110, section 7.6.3: a gateway must add Via to requests, and may to responses.
            via = f"{version} {self.forwarding.pseudonym}"
            lines += ((_VIA, _appended(headers, _VIA, via)),)
        elif self.forwarding.identity:
            name = self.forwarding.pseudonym
            lines += ((_CDN_LOOP, _appended(headers, _CDN_LOOP, name)),)
        return lines

    def _x_forwarded(self, headers: CIMultiDictProxy[str]) -> HeaderLines:
        """Return the X-Forwarded lines, which extend those of a trusted client."""
        host = headers.get("Host", "")
        if not self._trusted:
            return self._peer_lines + _lines((_HOST, host))
        return _lines(
            (_FOR, _appended(headers, _FOR, self._peer.address or "")),
            (_PROTO, headers.get(_PROTO) or self._peer.scheme),
            (_HOST, headers.get(_HOST) or host),
        )


def new_identity() -> str:
    """Return a random identity for a gateway, which fits into a token (RFC 9110, 5.6.2)."""
    return secrets.token_hex(_IDENTITY_BYTES)


def _lines(*lines: tuple[str, str]) -> HeaderLines:
    """Return the lines that have a value."""
    return tuple([line for line in lines if line[1]])


def _appended(headers: CIMultiDictProxy[str], name: str, value: str) -> str:
    """Append to the list of a header, which may span several lines."""
    if name not in headers:
        return value
    return ", ".join([each for each in (*headers.getall(name), value) if each])


def _new_id() -> str:
    """Return an id that is unique among processes and cannot be guessed."""
    if not _unused_ids:
        digits = os.urandom(_BATCH * _ID_BYTES).hex()
        size = 2 * _ID_BYTES
        _unused_ids.extend(digits[at : at + size] for at in range(0, len(digits), size))
    return _unused_ids.pop()


def _valid_id(given: list[str]) -> str | None:
    """Return the client's own request id, if there is one that can be logged."""
    if len(given) != 1 or not 0 < len(given[0]) <= _MAX_ID or not given[0].isascii():
        return None
    return None if given[0].encode().translate(None, _ID_CHARACTERS) else given[0]


def _encode(headers: HeaderLines) -> bytes:
    return "".join([f"{name}: {value}\r\n" for name, value in headers]).encode("latin-1")
