"""One HTTP/2 connection to a server, which carries many requests at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, Final, Protocol

from gateway.errors import (
    ErrorKind,
    GatewayError,
    ServerName,
    bad_response,
    escape_for_log,
    shorten,
    strip_tracebacks,
)
from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.events import (
    DataReceived,
    GoAwayReceived,
    HeadersReceived,
    StreamReset,
)
from gateway.http2.hpack import MAX_HEADER_LIST, HeaderList
from gateway.http2.session import (
    MAX_RECEIVED_FRAME,
    STREAM_WINDOW,
    Http2Session,
    StreamHandler,
)
from gateway.http2.stream import Stream
from gateway.sizes import QUOTED_TEXT
from gateway.system.buffers import MAX_WINDOW, BufferAccount
from gateway.upstream.address import ClosedTransport
from gateway.upstream.connect_errors import describe_certificate_refusal

MAX_STREAMS: Final = 100
"""Streams of one connection, if the server allows more: RFC 9113, section 6.5.2, recommends that
it allows at least so many."""

_CONNECTION_WINDOW: Final = MAX_STREAMS * MAX_WINDOW
"""So large that streams whose clients read slowly never stop the others. What is buffered is
limited by the windows of the streams."""

# The kernel finds a dead server, or a dead way to it: a PING would be answered by a server that
# hangs, too, and gRPC servers close connections for more than one in five minutes
# (too_many_pings). Calls have deadlines of their own.
_UNACKNOWLEDGED_TIMEOUT = 20
"""Seconds until a connection is dead on which sent bytes are not acknowledged: as in gRPC."""
_KEEPALIVE_IDLE = 30
_KEEPALIVE_INTERVAL = 10
_KEEPALIVE_PROBES = 3
"""If nothing was received for 30 s, the kernel probes three times, 10 s apart."""

_HTTP_1: Final = b"HTTP/1."
_ONLY_HTTP_1: Final = "it responded in HTTP/1.1, so this is not the address of its gRPC server"
_NO_SETTINGS: Final = "it closed the connection before it sent its HTTP/2 settings"

_ERROR_NAMES: Final = {int(code): code.name for code in ErrorCode}


class SessionOwner(Protocol):
    """The set of connections that a session belongs to."""

    def on_capacity(self) -> None:
        """Handle that a stream may be free on a connection."""

    def on_idle(self, session: ServerSession) -> None:
        """Handle that a connection has no streams any more."""

    def on_leaving(self, session: ServerSession) -> None:
        """Handle that a connection takes no more streams."""


class StreamReceiver(Protocol):
    """Gets what comes on a stream; the stream buffers the body."""

    def on_headers(self, headers: HeaderList) -> None:
        """Handle the headers of the response."""

    def on_data(self, size: int) -> None:
        """Handle that ``size`` bytes of the body have come, which are not the last ones."""

    def on_end(self) -> None:
        """Handle that the response is complete."""

    def on_error(self, error: Exception) -> None:
        """Handle a failure before the response was complete; reading its body raises it, too."""


class StreamDrain(Protocol):
    """Takes over streams whose calls have ended before the server's response has."""

    def take_over(self, stream: ServerStream, max_streams: int) -> bool:
        """Read a stream to its end and release it; False leaves it to its user.

        ``max_streams`` are the streams that its connection may have.
        """


class ServerStream(StreamHandler):
    """One request on a connection, and its response, which a ``receiver`` gets."""

    def __init__(self, session: ServerSession, stream: Stream, receiver: StreamReceiver) -> None:
        super().__init__(session, stream)
        self._server_session = session
        self._has_head = False
        self.receiver: StreamReceiver | None = receiver

    def receive_headers(self, headers: HeaderList) -> None:
        """Take in the headers of the response."""
        self._has_head = True
        if self.receiver is not None:
            self.receiver.on_headers(headers)

    def fail(self, error: Exception) -> None:
        """End the stream; a response that is complete stays so, whatever becomes of its request."""
        if self.stream.received_end and self._has_head:
            self.wake_writer()
            return
        strip_tracebacks(error)  # perhaps nobody ever raises it
        super().fail(error)
        if self.receiver is not None:
            self.receiver.on_error(error)

    def try_send(self, body: Sequence[bytes | memoryview], size: int) -> bool:
        """Send a whole body of ``size`` bytes, and end the request; False if it has to wait."""
        session = self._server_session
        if session.write_blocked or session.http2.sendable(self.stream) < size:
            return False
        left = size
        for data in body:
            if data:
                left -= len(data)
                session.http2.send_data(self.stream, data, end_stream=not left)
        session.flush_soon(size)
        return True

    def end_request(self) -> None:
        """End the request here, whatever was sent of it."""
        self.session.http2.send_data(self.stream, b"", end_stream=True)
        self.session.flush_soon()

    def close(self) -> None:
        """Release the stream, or leave that to the drain: only then the server is not told."""
        self.receiver = None
        session, stream = self._server_session, self.stream
        drain = session.stream_drain
        is_over = stream.closed or session.closed or not stream.sent_headers
        if is_over or drain is None or not drain.take_over(self, session.max_streams):
            self.release()

    def release(self) -> None:
        """Release the stream; the server is told if it is not complete."""
        self.receiver = None
        self.reset(ErrorCode.CANCEL)
        super().close()
        self._server_session.after_stream()


class ServerSession(Http2Session):
    """Sends requests to a ``server`` on streams, and gives them their responses."""

    def __init__(
        self,
        server: ServerName,
        owner: SessionOwner,
        buffers: BufferAccount | None = None,
        stream_drain: StreamDrain | None = None,
    ) -> None:
        http2 = Http2Connection(
            is_client=True,
            stream_window=STREAM_WINDOW,
            window=_CONNECTION_WINDOW,
            max_frame_size=MAX_RECEIVED_FRAME,
        )
        super().__init__(http2, buffers)
        self._server = server
        self._owner = owner
        self.stream_drain: Final = stream_drain
        self._is_connected = False
        self._goaway = ""
        self._first = b""
        self.ready: asyncio.Future[None] = self.loop.create_future()
        """Done once the settings of the server are there; only then its limits are known."""

    @property
    def stream_count(self) -> int:
        """The number of open streams."""
        return len(self.http2.streams)

    @property
    def max_streams(self) -> int:
        """The number of streams that may be open at a time."""
        return min(MAX_STREAMS, self.http2.peer_max_streams)

    @property
    def has_capacity(self) -> bool:
        """Whether a stream can be opened."""
        return (
            not self.closed
            and len(self.http2.streams) < MAX_STREAMS
            and self.http2.can_open_stream
            and not self.transport.is_closing()
        )

    def open_stream(self, receiver: StreamReceiver) -> ServerStream:
        """Open a stream; only if ``has_capacity``. Its headers must be sent at once."""
        return ServerStream(self, self.http2.open_stream(), receiver)

    def after_stream(self) -> None:
        """Count that a stream was released by its user."""
        if self.handlers:
            self._owner.on_capacity()
        elif self.http2.going_away or not self.has_capacity:
            self.shut_down()
        else:
            self._owner.on_capacity()
            if not self.handlers:
                self._owner.on_idle(self)

    def shut_down(self) -> None:
        """Close a connection without streams."""
        self._owner.on_leaving(self)
        if self.closed or self.transport.is_closing():
            return
        self.http2.shut_down()
        self.flush_output()
        if self.write_blocked:
            self.transport.abort()  # the server does not read
        else:
            self.transport.close()

    def on_timeout(self) -> None:
        """Close the connection: it was idle for too long."""
        self.shut_down()

    def drop(self) -> None:
        """Give up a connection that is not ready."""
        forget(self.ready)
        if self._is_connected:
            self.transport.abort()
        else:
            # uvloop does not end the transport of a cancelled connect, and the reference cycle with
            # the connection would stay.
            self.connection_made(ClosedTransport())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings, and let the kernel find out if the server is gone."""
        sock = transport.get_extra_info("socket")
        self._is_connected = sock is not None
        if sock is not None and sock.family != socket.AF_UNIX:
            _watch_for_death(sock)
        super().connection_made(transport)

    def data_received(self, data: bytes | memoryview) -> None:
        """Process frames of the server; its first bytes tell whether they are some."""
        if not self.ready.done():
            self._first += data[: len(_HTTP_1) - len(self._first)]
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all streams that are not complete."""
        super().connection_lost(exc)
        refused = describe_certificate_refusal(exc)
        if not self.ready.done() or refused:
            why = refused or self._no_http2() or _NO_SETTINGS
            self._fail_all(self._error(ErrorKind.UNREACHABLE, "cannot connect to", why))
        else:
            for handler in tuple(self.handlers):
                kind, when = _progress(handler)
                handler.fail(self._error(kind, "", f"closed the connection {when}"))
        self._owner.on_leaving(self)

    def on_headers(self, event: HeadersReceived) -> None:
        """Give a stream the headers of its response."""
        handler = event.stream.handler
        if not isinstance(handler, ServerStream):
            return
        if event.headers.too_large:
            message = f"sent headers of more than {MAX_HEADER_LIST} bytes"
            handler.fail(bad_response(f"{self._server.url} {message}", self._server))
            handler.reset(ErrorCode.CANCEL)
            return
        handler.receive_headers(event.headers)
        if event.end_stream:
            handler.receive(b"", 0)
            self._on_end(handler)

    def on_data(self, handler: StreamHandler, event: DataReceived) -> None:
        """Tell the receiver; let another request have the stream's slot if it is complete."""
        assert isinstance(handler, ServerStream)
        if event.end_stream:
            self._on_end(handler)
        elif handler.receiver is not None:
            handler.receiver.on_data(event.size)

    def on_trailers(self, handler: StreamHandler) -> None:
        """Tell the receiver; let another request have the stream's slot if it is complete."""
        assert isinstance(handler, ServerStream)
        self._on_end(handler)

    def on_reset(self, handler: StreamHandler, event: StreamReset) -> None:
        """Fail a stream that the server has reset, or on which it has broken the protocol."""
        error = event.error
        kind, when = _progress(handler)
        if not event.by_peer:
            kind, what = ErrorKind.BAD_RESPONSE, "sent an invalid HTTP/2 response"
        elif error.code is ErrorCode.REFUSED_STREAM and kind is ErrorKind.NO_RESPONSE:
            kind, what = ErrorKind.REFUSED, "did not process the request"
        else:
            what = f"broke off {when}"
        handler.fail(self._error(kind, "", f"{what}: {error.reason}"))
        self._owner.on_capacity()

    def on_goaway(self, event: GoAwayReceived) -> None:
        """Open no more streams; those that the server has accepted go on."""
        name = _ERROR_NAMES.get(event.error_code, f"error {event.error_code}")
        text = event.debug_data[:QUOTED_TEXT].decode(errors="replace")
        quoted = f": {shorten(escape_for_log(text), QUOTED_TEXT)}" if text else ""
        self._goaway = f"GOAWAY {name}{quoted}"
        self._owner.on_leaving(self)
        if not self.handlers:
            self.loop.call_soon(self.after_stream)

    def on_settings(self) -> None:
        """Take in the limits of the server."""
        if self.ready.done():
            self._owner.on_capacity()
        else:
            self.ready.set_result(None)

    def on_failure(self, error: Http2Error) -> None:
        """Fail all streams, as the server does not speak HTTP/2 as it should."""
        self._owner.on_leaving(self)
        if not self.ready.done():
            why = self._no_http2() or f"it does not speak HTTP/2: {error.reason}"
            self._fail_all(self._error(ErrorKind.UNREACHABLE, "cannot connect to", why))
        else:
            why = f"broke the HTTP/2 protocol: {error.reason}"
            self._fail_all(self._error(ErrorKind.BAD_RESPONSE, "", why))

    def _no_http2(self) -> str:
        """Say that a server responded in HTTP/1.1 to the preface; empty if it did not."""
        return _ONLY_HTTP_1 if self._first == _HTTP_1 else ""

    def _on_end(self, handler: ServerStream) -> None:
        if handler.receiver is not None:
            handler.receiver.on_end()
        if handler.stream.closed:
            self._owner.on_capacity()

    def _fail_all(self, error: GatewayError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
        for handler in tuple(self.handlers):
            handler.fail(error)

    def _error(self, kind: ErrorKind, before: str, why: str) -> GatewayError:
        """Make an error that names the server; operators also see why it went away."""
        start, middle = (f"{before} ", ": ") if before else ("", " ")
        goaway = f" ({self._goaway})" if self._goaway else ""
        return GatewayError(
            kind,
            f"{start}{self._server.url}{middle}{why}{goaway}",
            public_message=f"{start}{self._server.public}{middle}{why}",
        )


def _progress(handler: StreamHandler) -> tuple[ErrorKind, str]:
    """Return what it means that a stream ends now, and when that is."""
    if handler.stream.has_headers:
        return ErrorKind.BAD_RESPONSE, "before the end of its response"
    return ErrorKind.NO_RESPONSE, "before it responded"


def forget(future: asyncio.Future[Any]) -> None:
    """Cancel a future that nobody waits for, or whose error nobody needs to see."""
    if not future.cancel() and not future.cancelled():
        future.exception()


def _watch_for_death(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", 1000 * _UNACKNOWLEDGED_TIMEOUT),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
