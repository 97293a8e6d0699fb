"""TLS between a socket and the connection that uses it, on top of ssl.SSLObject.

The TLS of asyncio and uvloop does not fit a gateway:

- They count only a part of the unsent bytes, so a drain would cut off responses.
- asyncio resets a closing connection whose client still sends, and the response is lost.
- Both wait for the peer's close_notify, and a slow reader has only that time.
- They differ in what the end of a connection means.
- If a write fails, both throw away what the peer had sent before.

Here the only send buffer is that of the socket's transport. The sending side can be closed alone,
as on a plain connection. A connection before its handshake is known, and can be dropped. The CPU
time is that of uvloop's TLS. An idle connection takes 20 KB of memory (asyncio: 280 KB).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import suppress
from itertools import chain
from typing import Any, cast

from gateway.system.buffers import MIN_WINDOW
from gateway.system.read_buffer import READ_BUFFER
from gateway.system.sockets.connection import Connection, unread_data
from gateway.system.time_slices import time_slice_queue

ALPN_PROTOCOL = "alpn_protocol"
"""The name of the chosen protocol in ``get_extra_info``."""

CIPHERTEXT = memoryview(bytearray(256 * 1024))
"""Read buffer for encrypted bytes, shared by all connections: they leave it at once."""

_MAX_BIO = 64 * 1024
"""Maximum bytes in the buffers of ssl.SSLObject, which never shrink."""

_RECORD_HEADER = 5
"""Bytes before a record; the last two are its length: RFC 8446, section 5.1."""
_MAX_RECORD = _RECORD_HEADER + 2**14 + 256
"""Bytes of a record: RFC 8446, section 5.2. So many may wait for the rest of one."""
_MAX_RECORDS = 64
"""Records that are decrypted by one call. The smallest take some 30 µs each: they update a key."""
_TIME_SLICE_RECORDS = 128
"""Records of a connection that are decrypted in one time slice of the event loop. A read may
bring 11,000 of one byte, which take 50 ms; records of 1,400 bytes, as some peers send, fit."""
_MAX_EMPTY_RECORDS = 1024
"""Records of a connection that bring no data. Honest peers send a few, and
one for each 2^24 records after that (RFC 8446, section 5.5)."""

_NOTHING = memoryview(b"")

_log = logging.getLogger("tensorgate")


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """Decrypts and encrypts between a socket's transport and a connection.

    It is the protocol of the one and the transport of the other. After the handshake, it calls
    ``connection_made`` of the connection. Subclasses say what else its end means. ``server_name``
    is the name that the server's certificate must have; it is None on the server's side.
    """

    client = ""
    """Whose time slices its reads take; see TimeSliceQueue."""

    def __init__(
        self, context: ssl.SSLContext, connection: Connection, server_name: str | None
    ) -> None:
        super().__init__()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )
        self._connection: Connection | None = connection
        self._error: ssl.SSLError | None = None
        """Why TLS has failed after the handshake."""
        self._established = False
        """Whether the handshake has ended well, so that the connection has this transport."""
        self._received = _NOTHING
        """Received bytes that are not in ``_incoming`` yet."""
        self._counted = 0
        """Bytes that are counted in the buffers of the connection."""
        self._records_left = 0
        """Records that may be decrypted in this time slice."""
        self._waits_for_time_slice = False
        self._record_rest = 0
        """Bytes from the end of what was moved to ``_incoming`` to the next record."""
        self._empty_records = 0
        """Records that have brought no data, or not yet."""
        self._offered_size = 0
        self._reading = True
        self._eof = False
        """Whether the peer has sent close_notify."""
        self._input_closed = False
        """Whether received bytes are ignored."""
        self._output_closed = False
        """Whether nothing more can be sent."""
        self.has_received = False
        """Whether the peer has sent something of the handshake."""

    # The protocol of the socket's transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake."""
        self._socket = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back what this holds; close the connection, or report the failed handshake."""
        if self._established and isinstance(exc, OSError):
            self._receive_rest(exc)
        self._output_closed = True
        self._close_input()
        # Break the reference cycle, so that both are freed without the garbage collector.
        connection, self._connection = self._connection, None
        if self._established:
            assert connection is not None
            connection.connection_lost(self._error or exc)
        else:
            self.on_handshake_lost(exc)

    def on_handshake_end(self) -> None:
        """Note that the handshake has ended well; ``connection_made`` follows."""

    def on_handshake_error(self, error: ssl.SSLError) -> bytes | None:
        """Note that the handshake has failed; ``on_handshake_lost`` follows.

        Return what the peer gets in the clear instead of a TLS alert; None for the alert.
        """
        return None

    def on_handshake_lost(self, exc: Exception | None) -> None:
        """Note that the socket is closed, and the connection was never made."""

    def _receive_rest(self, exc: Exception | None) -> None:
        """Decrypt what the peer had sent before a write to it failed."""
        self._reading = True
        for data in chain((b"",), unread_data(self._socket, exc)):
            self._received = memoryview(b"".join((self._received, data)))
            size = -1
            while len(self._received) != size and not self._input_closed:
                size = len(self._received)
                self._process_received()
            if self._input_closed:
                return

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next read."""
        connection = self._connection
        size = MIN_WINDOW if connection is None else connection.buffers.account.read_size
        self._offered_size = min(len(CIPHERTEXT), size)
        return CIPHERTEXT[: self._offered_size]

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes that were read."""
        if self._input_closed:
            self._wait_for_time_slice()  # what nobody wants is read in time slices, too
            return
        data = CIPHERTEXT[:nbytes]
        rest = self._received
        self._received = memoryview(b"".join((rest, data))) if rest else data
        was_established = self._established
        self._process_received()
        if was_established and not self._input_closed and nbytes == self._offered_size:
            assert self._connection is not None
            self._connection.defer_next_read()
        # The next read, perhaps of another connection, overwrites the shared buffer.
        self._keep_received()

    def eof_received(self) -> None:
        """Note the end of input; the socket's transport then closes itself."""
        self._output_closed = True

    def pause_writing(self) -> None:
        """Pause the connection's writing."""
        if self._connection is not None:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Resume the connection's writing."""
        if self._connection is not None:
            self._connection.resume_writing()

    # The transport of the connection

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the socket, or the protocol that ALPN has chosen."""
        if name == ALPN_PROTOCOL:
            return self._tls.selected_alpn_protocol()
        if name == "ssl_object":
            return self._tls
        return self._socket.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another connection get what is received from now on."""
        self._count(0)
        self._connection = cast("Connection", protocol)
        self._keep_received()

    def is_closing(self) -> bool:
        """Whether the connection is closed or closing."""
        return self._socket.is_closing()

    def is_reading(self) -> bool:
        """Whether the connection gets received bytes."""
        return self._reading and not self._input_closed

    def pause_reading(self) -> None:
        """Pause reading."""
        self._reading = False
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading, first with the bytes that were received before."""
        if not self._reading:
            self._reading = True
            if not self._waits_for_time_slice:
                self._socket.resume_reading()
            # Not at once, because the caller may not expect data_received during this call.
            asyncio.get_running_loop().call_soon(self._process_rest)

    def get_write_buffer_size(self) -> int:
        """Return the bytes that wait for the peer to read."""
        return self._socket.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send data."""
        if self._output_closed:
            return
        rest = memoryview(data)
        sent = []
        try:
            while rest:
                rest = rest[self._tls.write(rest[:_MAX_BIO]) :]
                sent.append(self._outgoing.read())
            if not self._socket.is_closing():
                self._socket.writelines(sent)
        except ssl.SSLError as error:
            self._fail(error)

    def can_write_eof(self) -> bool:
        """Return True: TLS can close the sending side alone (RFC 8446, section 6.1)."""
        return True

    def write_eof(self) -> None:
        """Close the sending side once all is sent; ignore what the peer still sends."""
        self._send_close_notify()
        if not self._socket.is_closing():
            self._socket.write_eof()

    def close(self) -> None:
        """Close the connection once all is sent."""
        self._send_close_notify()
        self._socket.close()

    def abort(self) -> None:
        """Close the connection at once; without close_notify the peer sees a truncation."""
        self._output_closed = True
        self._close_input()
        self._socket.abort()

    def _close_input(self) -> None:
        """Ignore what was received and is still to come."""
        self._input_closed = True
        self._received = _NOTHING
        self._count(0)

    def _process_received(self) -> None:
        """Process received bytes of a time slice; an error of our own ends this connection.

        The event loop would let it live if this is called for the bytes of before.
        """
        self._records_left = _TIME_SLICE_RECORDS
        try:
            if self._established:
                self._decrypt_received()
            else:
                self._do_handshake()
        except Exception:
            peer = self._socket.get_extra_info("peername")
            _log.exception("the TLS connection of %s failed", peer or "a peer that is gone")
            self.abort()
        if self._reading and self._received and self._records_left <= 0:
            self._wait_for_time_slice()

    def _process_rest(self) -> None:
        """Process the bytes that were received before, unless their time slice comes later."""
        if self._waits_for_time_slice or self._input_closed:
            return
        self._process_received()
        self._keep_received()

    def _wait_for_time_slice(self) -> None:
        """Go on in the next time slice, and read nothing meanwhile."""
        if not self._waits_for_time_slice:
            self._waits_for_time_slice = True
            if not self._socket.is_closing():
                self._socket.pause_reading()
            time_slice_queue().add(self._use_time_slice, self.client)

    def _use_time_slice(self) -> None:
        self._waits_for_time_slice = False
        if self._reading and not self._socket.is_closing():
            self._socket.resume_reading()
            self._process_rest()

    def _keep_received(self) -> None:
        """Keep what waits in memory of its own.

        It is counted, but for a record whose rest is yet to come.
        """
        self._received = memoryview(bytes(self._received)) if self._received else _NOTHING
        waiting = self._incoming.pending + len(self._received)
        self._count(0 if self._input_closed else max(0, waiting - _MAX_RECORD))

    def _count(self, size: int) -> None:
        if size != self._counted and self._connection is not None:
            self._connection.buffers.change(size - self._counted)
            self._counted = size

    def _do_handshake(self) -> None:
        self.has_received = self.has_received or bool(self._received)
        try:
            self._feed_incoming()
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    if not self._feed_incoming():
                        self._flush_outgoing()
                        return
        except ssl.SSLError as error:
            self._reject_handshake(error)
            return
        self._flush_outgoing()
        assert self._connection is not None
        self._established = True
        self.on_handshake_end()
        self._connection.connection_made(self)
        self._decrypt_received()

    def _reject_handshake(self, error: ssl.SSLError) -> None:
        """Send the TLS alert for a failed handshake, and close."""
        refusal = self.on_handshake_error(error)
        self._output_closed = True
        self._close_input()
        if refusal is None:
            self._flush_outgoing()
        else:
            self._socket.write(refusal)
        self._socket.close()

    def _decrypt_received(self) -> None:
        """Decrypt received bytes for the connection."""
        while self._reading and not self._input_closed and self._connection is not None:
            try:
                size = self._decrypt(READ_BUFFER.prepare())
            except ssl.SSLError as error:
                self._fail(error)
                return
            if size:
                self._connection.data_received(READ_BUFFER.commit(size))
            elif self._eof:
                self._connection.eof_received()
                self.close()  # as on a plain connection after its end of input
            else:
                break
        if not self._input_closed:
            self._flush_outgoing()  # such as session tickets

    def _feed_incoming(self) -> bool:
        """Move some received records to ``_incoming``; return whether it moved any.

        Raises ssl.SSLError if too many have brought no data: such as KeyUpdate, each of which takes
        the gateway more time than the peer, and a response (RFC 8446, section 4.6.3).
        """
        if self._records_left <= 0:
            return False
        received, end, records = self._received, self._record_rest, 0
        size = min(len(received), _MAX_BIO)
        while end < size and records < _MAX_RECORDS:
            if end + _RECORD_HEADER > len(received):
                size = end  # the rest of the header is yet to come
                break
            records += 1
            length = received[end + 3] << 8 | received[end + 4]
            end += _RECORD_HEADER + length
        written = self._incoming.write(received[: min(end, size)])
        self._received = received[written:]
        self._record_rest = end - written
        self._records_left -= records
        self._empty_records += records
        if self._empty_records > _MAX_EMPTY_RECORDS:
            raise ssl.SSLError("too many records without data")
        return bool(written)

    def _decrypt(self, space: memoryview) -> int:
        """Decrypt received bytes into ``space``; return how many it has.

        Raises ssl.SSLError once the data before the error was returned.
        """
        if self._error is not None:
            raise self._error
        size = 0
        # A read without data raises SSLWantReadError, which for small messages costs the most.
        while size < len(space) and (
            self._incoming.pending or self._tls.pending() or self._feed_incoming()
        ):
            try:
                read = cast("int", self._tls.read(len(space) - size, space[size:]))
            except ssl.SSLWantReadError:
                if self._feed_incoming():
                    continue
                break
            except ssl.SSLZeroReturnError:
                read = 0
            except ssl.SSLError as error:
                self._error = error
                if not size:
                    raise
                break
            if not read:
                self._eof = True
                break
            size += read
            self._empty_records = max(0, self._empty_records - 1)
        return size

    def _flush_outgoing(self) -> None:
        if self._outgoing.pending and not self._socket.is_closing():
            self._socket.write(self._outgoing.read())

    def _send_close_notify(self) -> None:
        if not self._output_closed:
            self._output_closed = True
            self._close_input()
            with suppress(ssl.SSLError):  # unwrap wants the peer's close_notify, too
                self._tls.unwrap()
            self._flush_outgoing()

    def _fail(self, error: ssl.SSLError) -> None:
        _log.debug("a TLS connection failed: %s", tls_reason(error))
        self._error = error
        self.abort()


def tls_reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's name of an error, such as ``HTTP_REQUEST``, or its text."""
    return getattr(error, "reason", None) or str(error)
