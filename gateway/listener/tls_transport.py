"""TLS between a client's socket and its connection, on top of ssl's state machine.

Why it is not the loop's own TLS: what a gateway must hold to is lost there. A loop counts only a
part of what waits to be sent, so that a drain would cut answers off; asyncio resets a connection
whose client still sends when it is closed, and drops the answer with it; both wait for the client's
farewell, and give a slow reader just that long; and each loop takes the end of a connection for
something else. Here there is one buffer, the socket's; an end goes out as on a plain connection,
the sending side first if need be; and a connection without a handshake is known and can be dropped.
It costs the CPU time of uvloop's own, and an idle connection 20 KB of memory (asyncio's: 280 KB).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from gateway.http1.connection import Connection
from gateway.http1.read_buffer import READ_BUFFER
from gateway.listener.messages import encode_error
from gateway.system.buffers import MIN_WINDOW

HANDSHAKE_TIME = 10.0
"""Seconds that a client has for the handshake."""

_RECEIVED = memoryview(bytearray(256 * 1024))
"""Where reads put what is encrypted, for all connections: it moves on at once."""

_AT_ONCE = 64 * 1024
"""Bytes given to ssl's state machine at a time: its buffers never shrink."""

_log = logging.getLogger("tensorgate.listener")


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """The protocol of a socket's transport, and the transport of a client's connection.

    It is in ``shaking`` until the handshake is over, which only then makes the connection. Where
    that does not come to pass, ``on_failed`` is called once the socket is closed.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        connection: Connection,
        shaking: set[TlsTransport],
        on_failed: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._connection: Connection | None = connection
        self._shaking = shaking
        self._on_failed = on_failed
        self._encrypted: bytes | memoryview = b""
        """What has come and was not given to the state machine yet."""
        self._offered = 0
        self._reading = True
        self._ended = False
        """The client has said that it sends nothing more."""
        self._deaf = False
        """What still comes is of no interest."""
        self._mute = False
        """Nothing more can be written."""

    # What the socket's transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the handshake to begin."""
        self._socket = cast("asyncio.Transport", transport)
        self._shaking.add(self)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE_TIME, self._give_up, "no handshake in time")

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on, or note that there was no handshake."""
        self._deaf = self._mute = True
        self._timer.cancel()
        # Each knows the other; without that, both are freed at once, and not by a later search.
        connection, self._connection = self._connection, None
        if self not in self._shaking:
            assert connection is not None
            connection.connection_lost(exc)
            return
        self._shaking.remove(self)
        if self._on_failed is not None:
            self._on_failed()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Give the memory to read into."""
        self._offered = min(len(_RECEIVED), self._read_size())
        return _RECEIVED[: self._offered]

    def _read_size(self) -> int:
        return MIN_WINDOW if self._connection is None else self._connection.buffers.read_size

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        if self._deaf:
            return
        received = _RECEIVED[:nbytes]
        self._encrypted = b"".join((self._encrypted, received)) if self._encrypted else received
        if self in self._shaking:
            self._shake()
        else:
            self._read()
            if nbytes == self._offered and self._connection is not None:
                self._connection.defer_next_read()
        # The next read, whosever it is, goes to where this one is.
        self._encrypted = b"" if self._deaf else bytes(self._encrypted)

    def eof_received(self) -> None:
        """Take the end of what the client sends; the socket's transport then closes itself."""
        self._mute = True

    def pause_writing(self) -> None:
        """Pass it on."""
        if self._connection is not None:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        if self._connection is not None:
            self._connection.resume_writing()

    # What the connection calls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Give what is known of the socket."""
        return self._socket.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Tell whether the connection is closed, or about to be."""
        return self._socket.is_closing()

    def is_reading(self) -> bool:
        """Tell whether the connection is given what comes."""
        return self._reading and not self._deaf

    def pause_reading(self) -> None:
        """Hold back what comes."""
        self._reading = False
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Go on with what was held back."""
        if not self._reading:
            self._reading = True
            self._socket.resume_reading()
            # Not at once: whoever calls is in the middle of something.
            asyncio.get_running_loop().call_soon(self._read)

    def get_write_buffer_size(self) -> int:
        """Give the bytes that wait for the client to read."""
        return self._socket.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data."""
        if self._mute:
            return
        rest = memoryview(data)
        sent = []
        try:
            while rest:
                rest = rest[self._tls.write(rest[:_AT_ONCE]) :]
                sent.append(self._outgoing.read())
            if not self._socket.is_closing():
                self._socket.writelines(sent)
        except ssl.SSLError as error:
            self._give_up(_reason(error))

    def can_write_eof(self) -> bool:
        """Tell that the sending side can be closed alone: RFC 8446, section 6.1."""
        return True

    def write_eof(self) -> None:
        """Close the sending side once all is sent; nothing that still comes is passed on."""
        self._say_goodbye()
        self._socket.write_eof()

    def close(self) -> None:
        """Close the connection once all is sent."""
        self._say_goodbye()
        self._socket.close()

    def abort(self) -> None:
        """Close the connection at once: without a farewell, the client knows that it was cut."""
        self._deaf = self._mute = True
        self._socket.abort()

    def _shake(self) -> None:
        try:
            self._feed()
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    if not self._feed():
                        self._send()
                        return
        except ssl.SSLError as error:
            self._refuse(error)
            return
        self._send()
        self._timer.cancel()
        self._shaking.remove(self)
        if self._connection is not None:
            self._connection.connection_made(self)
            self._read()

    def _refuse(self, error: ssl.SSLError) -> None:
        """Tell the client what is wrong with its handshake, and close."""
        _log.debug("a handshake failed: %s", _reason(error))
        self._deaf = self._mute = True
        if error.reason == "HTTP_REQUEST":
            self._socket.write(encode_error(400, "this port speaks TLS: use https"))
        else:
            self._send()
        self._socket.close()

    def _read(self) -> None:
        """Pass on what can be decrypted."""
        while self._reading and not self._deaf and self._connection is not None:
            try:
                size = self._decrypt(READ_BUFFER.space())
            except ssl.SSLError as error:
                self._give_up(_reason(error))
                return
            if size:
                self._connection.data_received(READ_BUFFER.filled(size))
            elif self._ended:
                self.close()  # as on a plain connection whose client sends nothing more
            else:
                break
        if not self._deaf:
            self._send()  # what the state machine has to say by itself

    def _feed(self) -> bool:
        """Give the state machine the next of what has come; tell whether there was any."""
        written = self._incoming.write(self._encrypted[:_AT_ONCE])
        self._encrypted = self._encrypted[written:]
        return bool(written)

    def _decrypt(self, space: memoryview) -> int:
        """Fill the space with what has come, as far as that goes; give the bytes in it."""
        size = 0
        # Asking in vain is what costs most for small messages.
        while size < len(space) and (self._incoming.pending or self._tls.pending() or self._feed()):
            try:
                read = cast("int", self._tls.read(len(space) - size, space[size:]))
            except ssl.SSLWantReadError:
                if self._feed():
                    continue
                break
            except ssl.SSLZeroReturnError:
                read = 0
            if not read:
                self._ended = True
                break
            size += read
        return size

    def _send(self) -> None:
        if self._outgoing.pending and not self._socket.is_closing():
            self._socket.write(self._outgoing.read())

    def _say_goodbye(self) -> None:
        if not self._mute:
            self._deaf = self._mute = True
            with suppress(ssl.SSLError):  # it would go on to wait for the client's
                self._tls.unwrap()
            self._send()

    def _give_up(self, why: str) -> None:
        _log.debug("a TLS connection failed: %s", why)
        self.abort()


def _reason(error: ssl.SSLError) -> str:
    return error.reason or str(error)
