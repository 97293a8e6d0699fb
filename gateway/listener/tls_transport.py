"""TLS with clients: bounds the handshakes in progress, and logs who stalls."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterator

from gateway.errors import bad_request
from gateway.http1.connection import Connection
from gateway.listener.client_shares import ClientShares, client_of
from gateway.listener.messages import encode_error
from gateway.proxy.dispatch import error_body
from gateway.system.descriptors import descriptor_limit
from gateway.system.tls_transport import TlsTransport, tls_reason

HANDSHAKE_TIMEOUT = 10.0
"""Seconds for a handshake at most: some round trips, however slowly a client sends requests."""
MAX_HANDSHAKES = 4096
"""Handshakes at a time, each of which takes up to 50 KB; each further one takes the place of
another: see ClientShares. A burst of as many that do not stall takes a core some four seconds."""

_LOG_INTERVAL = 10.0
"""Seconds in which one stalled handshake is logged."""

_HTTP_REQUEST = "HTTP_REQUEST"

_log = logging.getLogger("tensorgate.listener")


class Handshakes:
    """The TLS handshakes of a listener that are in progress: bounds them, and logs who stalls."""

    def __init__(self) -> None:
        # Half of the descriptors stay free for connections that are open, and for servers.
        limit = min(MAX_HANDSHAKES, descriptor_limit() // 2)
        self._shares = ClientShares[ClientTlsTransport](limit)
        self._log_after = float("-inf")

    def __len__(self) -> int:
        return len(self._shares)

    def __iter__(self) -> Iterator[ClientTlsTransport]:
        return iter(self._shares)

    def begin(self, transport: ClientTlsTransport, client: str) -> None:
        """Count a handshake; if there are too many, that of another gives way."""
        for each in self._shares.add(transport, client):
            self.log(each, "gave way to others")
            each.abort()

    def end(self, transport: ClientTlsTransport) -> None:
        """Stop counting a handshake."""
        self._shares.discard(transport)

    def log(self, transport: ClientTlsTransport, what: str) -> None:
        """Log what happened to a handshake, and how many there are, at a limited rate."""
        now = asyncio.get_running_loop().time()
        if now >= self._log_after:
            self._log_after = now + _LOG_INTERVAL
            _log.warning(
                "the TLS handshake of %s %s; handshakes in progress: %d",
                transport.client or "a client",
                what,
                len(self._shares),
            )


class ClientTlsTransport(TlsTransport):
    """The gateway's side of TLS with a client.

    The handshake may take ``max_seconds``; meanwhile it is in ``handshaking``. If it fails,
    ``on_failed`` is called once the socket is closed.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        connection: Connection,
        handshaking: Handshakes,
        max_seconds: float,
        on_failed: Callable[[], None] | None,
    ) -> None:
        super().__init__(context, connection, None)
        self._handshaking = handshaking
        self._max_handshake = min(HANDSHAKE_TIMEOUT, max_seconds)
        self._on_failed = on_failed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the handshake."""
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._handshake_timer = loop.call_later(self._max_handshake, self._end_slow_handshake)
        self.client = client_of(transport.get_extra_info("peername"))
        self._handshaking.begin(self, self.client)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the handshake, too."""
        self._handshake_timer.cancel()
        self._handshaking.end(self)
        super().connection_lost(exc)

    def on_handshake_end(self) -> None:
        """Stop its clock."""
        self._handshake_timer.cancel()
        self._handshaking.end(self)

    def on_handshake_error(self, error: ssl.SSLError) -> None:
        """Log why it failed."""
        _log.debug("a handshake failed: %s", tls_reason(error))

    def refusal(self, error: ssl.SSLError) -> bytes | None:
        """Return a response for a client that speaks HTTP without TLS."""
        if tls_reason(error) != _HTTP_REQUEST:
            return None
        needs_tls = bad_request("this port requires TLS: use https")
        return encode_error(needs_tls, error_body(needs_tls.message))

    def on_handshake_lost(self, exc: Exception | None) -> None:
        """Report it."""
        if self._on_failed is not None:
            self._on_failed()

    def _end_slow_handshake(self) -> None:
        if not self._input_closed:  # else it was rejected, and the client has not read why
            limit = f"{self._max_handshake:g} s (limits.request_header_timeout)"
            self._handshaking.log(self, f"did not end within {limit}")
        self.abort()
