"""One HTTP/1.1 connection to a server, which carries one request after the other."""

from __future__ import annotations

import asyncio
import logging
import select
from http import HTTPStatus
from typing import Final

from gateway.errors import ErrorKind, GatewayError, ServerName, bad_response, strip_tracebacks
from gateway.http1.body import BodyDecoder, ChunkedDecoder, LengthDecoder, UntilCloseDecoder
from gateway.http1.connection import HEAD_COPIES, Http1Body, Http1Connection
from gateway.http1.head import MAX_CACHED_HEAD, HeadParser, HeadReader, MalformedError, ResponseHead
from gateway.sizes import MAX_FAST_RESPONSE
from gateway.system.buffers import MAX_WINDOW, BufferAccount
from gateway.upstream.address import ClosedTransport, describe_certificate_refusal
from gateway.upstream.exchange import WRITE_CHUNK, Exchange
from gateway.upstream.transport import KEYED_RESPONSE_HEADERS

_MAX_COMPLETE: Final = MAX_FAST_RESPONSE
"""Largest body that is waited for, and that ``on_complete`` gets if it may be converted."""
_MAX_UNTOUCHED: Final = MAX_WINDOW
"""Largest body that ``on_complete`` gets if it passes untouched, and came with its head."""

MAX_INTERIM_RESPONSES: Final = 100
"""Interim (1xx) responses to one request; Python's and Ruby's HTTP clients have the same cap."""

_STALE_WINDOW: Final = 1.0
"""Seconds after a request in which a close is taken for one that crossed the request."""

_CLOSED_AFTER_REQUEST: Final = (
    "closed the connection after the request was sent, without a response; it may have executed "
    "the request"
)

_KEEP_ALIVE_MARGIN: Final = 1.0
"""Seconds by which an idle connection closes before the server's own time: its clock started
earlier, and the next request takes its way."""


_FRAME_HEADER: Final = 9
_SETTINGS: Final = 4
"""RFC 9113, section 4.1 and 6.5: an HTTP/2 server begins with a frame of this type."""

_log = logging.getLogger("tensorgate.upstream")

_HEAD_PARSER: Final = HeadParser(KEYED_RESPONSE_HEADERS, noted=("content-length",))


class StaleConnectionError(GatewayError):
    """The server closed a reused connection soon after a request, without a byte of response.

    Most servers did so because it was idle, and never saw the request: RFC 9112, section 9.3.1.
    One that fails may have executed it.
    """

    def __init__(self, server: ServerName) -> None:
        message = f"{server.url} {_CLOSED_AFTER_REQUEST}"
        super().__init__(ErrorKind.NO_RESPONSE, message, server=server)


class ServerConnection(Http1Connection):
    """Reads the responses of a ``server``; their exchanges write the requests.

    ``open_connections`` has it from the start of its connect to its close.
    """

    def __init__(
        self,
        server: ServerName,
        buffers: BufferAccount | None = None,
        open_connections: set[ServerConnection] | None = None,
    ) -> None:
        super().__init__(buffers)
        self._open_connections = set() if open_connections is None else open_connections
        self._open_connections.add(self)
        self._server = server
        self._reader = HeadReader(is_request=False)
        self._method = ""
        self._exchange: Exchange | None = None
        self._keep = False
        self._ended = False
        self._is_reused = False
        self._readiness: select.poll | None = None
        self.max_idle: float | None = None
        """Seconds for which the server keeps the connection idle, less a margin, if it says so."""
        self._started_at = 0.0
        self._silent = True
        self._interim = 0
        self._speaks_http2 = False
        self._decoder: BodyDecoder | None = None
        self.body: Http1Body | None = None
        """The response's body, once the head is there."""
        self.chunked = False
        """Whether the body of the request is sent in chunks, as it has no Content-Length."""
        self._sent = 0

    @property
    def reusable(self) -> bool:
        """Tell whether another request may follow a complete response.

        A server may respond before it has read the whole request. What is unsent then may be in
        memory of the call, which is the next one's once this one is over.
        """
        if not self._keep or not self._ended or self.write_blocked:
            return False
        return not self.transport.get_write_buffer_size()

    def is_stale(self) -> bool:
        """Tell whether the server has closed an idle connection, or sent something over it.

        Ask right before a request is written. The event loop learns of a close only in its next
        iteration, however long the connection was idle: the close may have come with the same
        events as the call, or during this iteration. The system call takes less than 1 µs.
        """
        if self.transport.is_closing():
            return True
        readiness = self._readiness
        if readiness is None:
            readiness = self._readiness = select.poll()
            # An end of input and a reset count as readable. uvloop's sockets cannot be peeked at.
            readiness.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(readiness.poll(0))

    def set_unused(self) -> None:
        """Let a new connection be kept idle: it is reusable although it had no request."""
        self._keep = self._ended = not self.closed

    def begin_request(self, method: str, exchange: Exchange) -> None:
        """Expect the response to a request of this method.

        It fails with a GatewayError (502) if the server closes or sends no valid response.
        """
        self._is_reused = self._ended
        self._started_at = self.loop.time()
        self._silent = True
        self._interim = 0
        self._method = method
        self._exchange = exchange
        self._keep = self._ended = False
        self._decoder = self.body = None
        if self.closed:
            self.fail(self._closed_too_early())

    async def send(self, data: bytes | memoryview, *, is_counted: bool = False) -> None:
        """Send a piece of the body; see BodySink."""
        self.write_body(data, self.chunked)
        await self.drain()
        self._sent += len(data)
        if self._sent >= WRITE_CHUNK:
            self._sent = 0
            # With a fast server, a buffered body would go out in one time slice of the event loop.
            await asyncio.sleep(0)

    async def end_sending(self) -> None:
        """End the body; see BodySink."""
        self.end_body(self.chunked)

    def buffer_body(self, body: bytes | memoryview) -> None:
        """Keep a complete body for its reader."""
        self.body = Http1Body(self.read_flow, self.buffers)
        self.body.feed(body, last=True)
        self.body.end()

    def fail(self, error: Exception) -> None:
        """Pass an error to the exchange or the body's reader, and drop the connection."""
        strip_tracebacks(error)  # perhaps nobody ever raises it
        exchange = self._exchange
        if exchange is not None and exchange.receiver is not None:
            self.discard_body()  # it has no reader
        elif self.body is not None:
            self.body.fail_body(error)
        self._abort()
        if exchange is not None:
            exchange.on_error(error)

    def detach_transport(self) -> None:
        """Release the transport after a cancelled connect.

        uvloop does not end it then, and the reference cycle with the connection would stay.
        """
        super().connection_made(ClosedTransport())
        self._open_connections.discard(self)

    def drop(self) -> None:
        """Close at once, without a call to the exchange or an error for the body's reader."""
        self.discard_body()
        self._abort()

    def discard_body(self) -> None:
        """Discard the unread part of a response's body when its call is over."""
        if self._head_size:
            self._count_head(0)
        if self.body is not None:
            self.body.discard()

    def _abort(self) -> None:
        self.discard_read_ahead()
        self._keep = False
        self._exchange = None
        self.transport.abort()

    def data_received(self, data: bytes | memoryview) -> None:
        """Handle bytes from the server."""
        self._silent = False
        if self._read_ahead:
            self.buffer_read_ahead(data)
            return
        try:
            if self.body is None:
                self._read_head(data)
            else:
                self._read_body(data)
        except GatewayError as error:
            self.fail(error)
        except MalformedError as error:
            server = self._server
            if _begins_http2(self._reader.received or data):
                self.fail(self._no_http1())
                return
            self.fail(bad_response(f"{server.url} sent an invalid HTTP response: {error}", server))
        except Exception as error:
            # A bug of the gateway: whoever waits for the response must learn of it.
            _log.exception("reading a response of %s failed", self._server.url)
            self.fail(error)

    def eof_received(self) -> None:
        """Handle the end of the server's bytes; the transport then closes itself.

        Over TLS an attacker can end the connection, but cannot send close_notify (RFC 8446,
        section 6.1): TlsTransport calls this after close_notify only.
        """
        self._keep = False
        until_close = isinstance(self._decoder, UntilCloseDecoder)
        if self.body is not None and until_close:
            self._end_body(self.body)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the pending response, if any."""
        self._open_connections.discard(self)
        self.receive_rest(exc)
        super().connection_lost(exc)
        while self._read_ahead:
            self.process_read_ahead()
        # In TLS 1.3 the server checks the gateway's certificate after the handshake, and before the
        # first request. Of a later one it may have seen all, whatever its alert says.
        if not self._is_reused and (refused := describe_certificate_refusal(exc)):
            message = f"cannot connect to {self._server.url}: {refused}"
            self.fail(GatewayError(ErrorKind.UNREACHABLE, message, server=self._server))
        elif exc is not None and not isinstance(exc, OSError):
            # A bug of the gateway, which has closed the connection: the server may have responded.
            self.fail(exc)
        else:
            self.fail(self._closed_too_early())

    def _read_head(self, data: bytes | memoryview) -> None:
        exchange = self._exchange
        if exchange is None:
            # An unexpected response would be taken for the response to the next request.
            self._speaks_http2 = _begins_http2(data)
            self.drop()
            return
        while (result := self._reader.feed(data)) is not None:
            text, data = result
            head = _HEAD_PARSER.parse_response(text, self._method)
            if head.status >= 200:
                is_small = len(text) <= MAX_CACHED_HEAD
                if self._head_size or not is_small:
                    self._count_head(0 if is_small else HEAD_COPIES * len(text))
                self._finish_head(head, exchange, data, is_small)
                return
            self._check_interim(head.status)
        self._count_head(len(self._reader.received))

    def _check_interim(self, status: int) -> None:
        """Count an interim response; raises GatewayError (502) for 101 or too many."""
        if status == HTTPStatus.SWITCHING_PROTOCOLS:
            raise bad_response(
                f"{self._server.url} returned 101 Switching Protocols, which the gateway did not "
                "request",
                self._server,
            )
        self._interim += 1
        if self._interim > MAX_INTERIM_RESPONSES:
            raise bad_response(
                f"{self._server.url} sent more than {MAX_INTERIM_RESPONSES} interim (1xx) "
                "responses to one request",
                self._server,
            )

    def _finish_head(
        self, head: ResponseHead, exchange: Exchange, data: bytes | memoryview, is_small: bool
    ) -> None:
        # Some servers send a body after HEAD; it may arrive when the next response is expected.
        self._keep = head.keep_alive and self._method != "HEAD"
        timeout = head.keep_alive_timeout
        if timeout is not None:
            timeout -= min(_KEEP_ALIVE_MARGIN, timeout / 2)
        self.max_idle = timeout
        if is_small and _may_be_complete(head, exchange):
            if len(data) == head.length:
                self._complete(head, exchange, data)
                return
            if _is_worth_waiting(head, exchange):
                exchange.hold(head)
                self._begin_body(head, data)
                return
        self._begin_body(head, data)
        # Only now: if the body is broken from its start, the receiver gets the error.
        exchange.hand_over(head)

    def _begin_body(self, head: ResponseHead, data: bytes | memoryview) -> None:
        self.body = Http1Body(self.read_flow, self.buffers)
        if head.length is not None:
            self._decoder = LengthDecoder(head.length)
        else:
            self._decoder = ChunkedDecoder() if head.chunked else UntilCloseDecoder()
        self._read_body(data)

    def _read_body(self, data: bytes | memoryview) -> None:
        assert self.body is not None
        decoder = self._decoder
        if decoder is None or self._ended:
            self._keep = self._keep and not data
            return
        body = self.body
        if piece := decoder.feed(data):
            body.feed(piece, last=decoder.ended)
        if decoder.ended:
            # First: the end of the body may be the start of the next request.
            self._keep = self._keep and not decoder.rest
            self._end_body(body)
            return
        exchange = self._exchange
        if exchange is not None and exchange.held is not None:
            is_chunked = not isinstance(decoder, LengthDecoder)
            if body.is_full or (is_chunked and body.buffered_size > _MAX_COMPLETE):
                exchange.on_timeout()
        if decoder.rest:
            self.defer_read_ahead(decoder.rest)

    def _end_body(self, body: Http1Body) -> None:
        body.end()
        self._ended = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None and (head := exchange.take_held()) is not None:
            self._complete(head, exchange, body.take())

    def _complete(self, head: ResponseHead, exchange: Exchange, body: bytes | memoryview) -> None:
        self._ended = True
        self._exchange = self.body = None
        exchange.complete(head, body)

    def _no_http1(self) -> GatewayError:
        return bad_response(
            f"{self._server.url} responded in HTTP/2 to a request in HTTP/1.1; the address of a "
            "gRPC server begins with grpc://",
            self._server,
        )

    def _closed_too_early(self) -> GatewayError:
        if self._speaks_http2:
            return self._no_http1()
        if self._silent and self._is_reused and self.loop.time() - self._started_at < _STALE_WINDOW:
            return StaleConnectionError(self._server)
        when = "before it responded" if self.body is None else "before the end of its response"
        kind = ErrorKind.NO_RESPONSE if self._silent else ErrorKind.BAD_RESPONSE
        message = f"{self._server.url} closed the connection {when}"
        return GatewayError(kind, message, server=self._server)


def _begins_http2(data: bytes | memoryview) -> bool:
    """Tell whether a server's first bytes are the SETTINGS of HTTP/2."""
    header = bytes(data[:_FRAME_HEADER])
    return len(header) == _FRAME_HEADER and header[3] == _SETTINGS and not any(header[5:])


def _is_worth_waiting(head: ResponseHead, exchange: Exchange) -> bool:
    """Tell whether to wait for the rest of a body: servers often send it after the head."""
    if head.length is not None:
        return head.length <= _MAX_COMPLETE
    receiver = exchange.receiver
    return head.chunked and receiver is not None and receiver.waits_for_chunks


def _may_be_complete(head: ResponseHead, exchange: Exchange) -> bool:
    """Tell whether the receiver may get a response with its complete body."""
    if head.length is None:
        return head.chunked
    if head.length <= _MAX_COMPLETE:
        return True
    receiver = exchange.receiver
    is_small = head.length <= _MAX_UNTOUCHED
    return is_small and receiver is not None and receiver.passes_untouched(head)
