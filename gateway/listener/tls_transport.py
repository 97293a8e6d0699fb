"""TLS with clients: ends handshakes that are slow or too many, and logs those that fail."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from gateway.errors import bad_request
from gateway.listener.client_shares import ClientShares, client_of
from gateway.listener.messages import encode_response, error_template
from gateway.observe.failure_log import REFUSAL_LOG
from gateway.proxy.errors import error_body
from gateway.system.descriptors import descriptor_limit
from gateway.system.sockets.connection import Connection
from gateway.system.tls_transport import TlsTransport, tls_reason

HANDSHAKE_TIMEOUT = 10.0
"""Seconds for a handshake at most: some round trips, however slowly a client sends requests."""
MAX_HANDSHAKES = 4096
"""Handshakes at a time, each of which takes up to 50 KB; each further one takes the place of
another: see ClientShares. A burst of as many that do not stall takes a core some four seconds."""

_HTTP_REQUEST = "HTTP_REQUEST"
_DISTRUST = "the client does not trust the gateway's certificate (tls.certificate)"
_NOT_TLS = "the client does not speak TLS"
_NO_COMMON_VERSION = "no common version: the gateway speaks TLS 1.2 and 1.3"
_NO_COMMON_CIPHER = "the client and the gateway have no cipher in common"

# OpenSSL's names of errors, and those of the alerts of clients.
_REASONS = {
    _HTTP_REQUEST: "the client sent HTTP without TLS; it must use https",
    "HTTPS_PROXY_REQUEST": "the client takes this port for a proxy, and sent CONNECT without TLS",
    "WRONG_VERSION_NUMBER": _NOT_TLS,
    "RECORD_LAYER_FAILURE": _NOT_TLS,
    "PACKET_LENGTH_TOO_LONG": _NOT_TLS,
    "UNEXPECTED_MESSAGE": _NOT_TLS,
    "UNSUPPORTED_PROTOCOL": _NO_COMMON_VERSION,
    "VERSION_TOO_LOW": _NO_COMMON_VERSION,
    "TLSV1_ALERT_PROTOCOL_VERSION": _NO_COMMON_VERSION,
    "NO_SHARED_CIPHER": _NO_COMMON_CIPHER,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _NO_COMMON_CIPHER,
    "TLSV1_ALERT_UNKNOWN_CA": _DISTRUST,
    "SSLV3_ALERT_BAD_CERTIFICATE": _DISTRUST,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": _DISTRUST,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _DISTRUST,
    "SSLV3_ALERT_CERTIFICATE_REVOKED": _DISTRUST,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": (
        "the client sent no certificate, which tls.client_certificates requires"
    ),
}


def max_handshakes() -> int:
    """Return how many handshakes may be in progress at a time."""
    # Half of the descriptors stay free for connections that are open, and for servers.
    return min(MAX_HANDSHAKES, descriptor_limit() // 2)


class ClientTlsTransport(TlsTransport):
    """The gateway's side of TLS with a client.

    The handshake may take ``max_seconds``; meanwhile it is in ``handshaking``. If it fails, the
    reason is logged, and ``on_failed`` is called once the socket is closed.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        connection: Connection,
        handshaking: ClientShares[ClientTlsTransport],
        max_seconds: float,
        on_failed: Callable[[], None],
    ) -> None:
        super().__init__(context, connection, None)
        self._handshaking = handshaking
        self._max_handshake = min(HANDSHAKE_TIMEOUT, max_seconds)
        self._on_failed = on_failed
        self._listener = ""
        """The address that the client has connected to."""
        self._has_ended = False
        """Whether the handshake has ended, and was logged if it failed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the handshake."""
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._handshake_timer = loop.call_later(self._max_handshake, self._end_slow_handshake)
        self.client = client_of(transport.get_extra_info("peername"))
        self._listener = _address(transport.get_extra_info("sockname"))
        for each in self._handshaking.add(self, self.client):
            each.give_way(len(self._handshaking))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the handshake, too."""
        self._handshake_timer.cancel()
        self._handshaking.discard(self)
        super().connection_lost(exc)

    def on_handshake_end(self) -> None:
        """Stop its clock."""
        self._has_ended = True
        self._handshake_timer.cancel()
        self._handshaking.discard(self)

    def on_handshake_error(self, error: ssl.SSLError) -> bytes | None:
        """Log why it failed; return a response for a client that speaks HTTP without TLS."""
        self._refuse(_describe(error))
        if tls_reason(error) != _HTTP_REQUEST:
            return None
        needs_tls = bad_request("this port requires TLS: use https")
        template, body = error_template(needs_tls), error_body(needs_tls.message)
        return b"".join(encode_response(template, b"", body, last=True))

    def on_handshake_lost(self, exc: Exception | None) -> None:
        """Log a client that left amid its handshake; a check that a port is open sends nothing."""
        if self.has_received:
            self._refuse("the client closed the connection amid the handshake")
        self._on_failed()

    def give_way(self, in_progress: int) -> None:
        """End the handshake for others, of which there are so many."""
        self._refuse(f"it gave way to others; handshakes in progress: {in_progress}")
        self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self._has_ended = True
        super().abort()

    def _end_slow_handshake(self) -> None:
        self._refuse(f"no end within {self._max_handshake:g} s (limits.request_header_timeout)")
        self.abort()

    def _refuse(self, reason: str) -> None:
        """Log why the handshake failed, once."""
        if not self._has_ended:
            self._has_ended = True
            client = self.client or "a client"
            REFUSAL_LOG.warn(f"TLS handshake of {client} with {self._listener} failed", reason)


def _describe(error: ssl.SSLError) -> str:
    """Say in plain words why a handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        return f"the client's certificate is not accepted by tls.client_ca ({why})"
    reason = tls_reason(error)
    return _REASONS.get(reason) or reason.lower().replace("_", " ")


def _address(sockname: object) -> str:
    """Return the address of a listening socket as operators write it."""
    if not isinstance(sockname, tuple):
        return "the gateway"
    host = f"[{sockname[0]}]" if ":" in sockname[0] else sockname[0]
    return f"{host}:{sockname[1]}"
