"""One HTTP/2 connection to a server, which carries many requests at a time."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

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
from gateway.http2.events import DataReceived, HeadersReceived, StreamReset
from gateway.http2.frames import GoAwayFrame
from gateway.http2.hpack import MAX_HEADER_LIST, HeaderList
from gateway.http2.session import MAX_RECEIVED_FRAME, STREAM_WINDOW, Http2Session, StreamHandler
from gateway.http2.stream import Stream
from gateway.sizes import QUOTED_TEXT
from gateway.system.buffers import MAX_WINDOW, BufferAccount
from gateway.upstream.address import ClosedTransport, describe_certificate_refusal
from gateway.upstream.exchange import forget

MAX_STREAMS: Final = 100
"""Streams of one connection, if the server allows more: RFC 9113, section 6.5.2, recommends that
it allows at least so many."""

_CONNECTION_WINDOW: Final = MAX_STREAMS * MAX_WINDOW
"""So large that streams whose clients read slowly never stop the others. What is buffered is
limited by the windows of the streams."""

# The kernel finds a dead host, or a dead way to it. A server that hangs acknowledges TCP's segments
# as ever: see ``Http2ServerConnection.give_up``.
_UNACKNOWLEDGED_TIMEOUT: Final = 20
"""Seconds until a connection is dead on which sent bytes are not acknowledged: as in gRPC."""
_KEEPALIVE_IDLE: Final = 30
_KEEPALIVE_INTERVAL: Final = 10
_KEEPALIVE_PROBES: Final = 3
"""If nothing was received for 30 s, the kernel probes three times, 10 s apart."""

_PING: Final = b"are you?"

_HTTP_1: Final = b"HTTP/1."
_HTTP_1_ADDRESS: Final = (
    "; the address of a server that speaks HTTP/1.1 begins with http:// or https://"
)
_ONLY_HTTP_1: Final = "it responded in HTTP/1.1" + _HTTP_1_ADDRESS
_NO_SETTINGS: Final = (
    "it closed the connection before it sent its HTTP/2 settings" + _HTTP_1_ADDRESS
)
_NO_REQUEST: Final = "it closed the connection before it took a request"
_NO_STREAMS: Final = "it allows no requests (its SETTINGS_MAX_CONCURRENT_STREAMS is 0)"

_log = logging.getLogger("tensorgate.upstream")

_ERROR_NAMES: Final = {int(code): code.name for code in ErrorCode}


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Seconds without a byte of a server that make its connection suspect, while calls wait."""

    given_up: float = 1.0
    """When the user of a call gives it up. A deadline of some milliseconds says nothing."""
    in_progress: float = 10.0
    """While all calls go on."""
    ping: float = 20.0
    """After a PING, as in gRPC: a server that computes in its event loop is only busy."""


class SessionOwner(Protocol):
    """The set of connections that a session belongs to."""

    def on_capacity(self) -> None:
        """Handle that a stream may be free on a connection."""

    def on_idle(self, session: Http2ServerConnection) -> None:
        """Handle that a connection has no streams any more."""

    def on_leaving(self, session: Http2ServerConnection) -> None:
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

    def __init__(
        self, session: Http2ServerConnection, stream: Stream, receiver: StreamReceiver
    ) -> None:
        self._server_session = session
        self._has_head = False
        self._is_given_up = False
        self.receiver: StreamReceiver | None = receiver
        super().__init__(session, stream)

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

    async def end_sending(self) -> None:
        """End the request, all of which was sent; see BodySink."""
        await self.send(b"", end_stream=True)

    def end_request(self) -> None:
        """End the request here, whatever was sent of it."""
        self.session.http2.send_data(self.stream, b"", end_stream=True)
        self.session.flush_soon()

    def give_up(self) -> None:
        """Note that its user waits no longer for its response; see that of the connection."""
        stream = self.stream
        if not self._is_given_up and not (stream.closed or stream.received_end):
            self._is_given_up = True
            self._server_session.give_up(stream)

    def close(self) -> None:
        """Release the stream, or leave that to the drain: only then the server is not told."""
        self.receiver = None
        is_drained = False
        try:
            self.give_up()  # also if it is drained: the connection may be silent
            is_drained = self._try_drain()
        except Exception:
            self._server_session.abort_after_error()
        finally:
            if not is_drained:
                self.release()

    def release(self) -> None:
        """Release the stream; the server is told if it is not complete."""
        self.receiver = None
        super().close()
        session = self._server_session
        session.give_back()
        session.run_guarded(session.after_stream)

    def _try_drain(self) -> bool:
        session, stream = self._server_session, self.stream
        drain = session.stream_drain
        is_over = stream.closed or session.closed or not stream.sent_headers
        return not is_over and drain is not None and drain.take_over(self, session.max_streams)


class Http2ServerConnection(Http2Session):
    """Sends requests to a ``server`` on streams, and gives them their responses.

    A connection may live on while its server is silent. So it takes no new call after a call on it
    has timed out, nor from when the server is asked for a sign of life until that comes.
    """

    def __init__(
        self,
        server: ServerName,
        owner: SessionOwner,
        buffers: BufferAccount | None = None,
        silence: SilenceLimits | None = None,
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
        self._silence = silence or SilenceLimits()
        self._first = b""
        self._silent_since = 0.0
        """When the last byte came; or, if no call waited then, when the next call began."""
        self._owes_response = False
        """Whether a call was given up, and the server has responded to none since."""
        self._was_pinged = False
        """Whether a PING was sent after the last part of a response. gRPC servers close connections
        for more of them: ``too_many_pings``."""
        self._is_checked = False
        """Whether nothing was received since the PING."""
        self._is_retired = False
        self._timer: asyncio.TimerHandle | None = None
        self.ready: asyncio.Future[None] = self.loop.create_future()
        """Done once the settings of the server are there, and allow a stream."""

    @property
    def max_streams(self) -> int:
        """The number of streams that may be open at a time."""
        return min(MAX_STREAMS, self.http2.peer_max_streams)

    @property
    def has_capacity(self) -> bool:
        """Whether a stream can be opened."""
        return (
            not (self.closed or self._is_retired or self._is_checked)
            and len(self.http2.streams) < MAX_STREAMS
            and self.http2.can_open_stream
            and not self.transport.is_closing()
        )

    @property
    def refusal(self) -> GatewayError | None:
        """Why a connection that is ready takes no requests and never will; None if it may."""
        if self.max_streams <= 0:
            return self._error(ErrorKind.UNREACHABLE, _NO_STREAMS)
        if not (self.closed or self.http2.going_away):
            return None
        return self._error(ErrorKind.UNREACHABLE, _NO_REQUEST)

    def open_stream(self, receiver: StreamReceiver) -> ServerStream:
        """Open a stream; only if ``has_capacity``. Its headers must be sent at once."""
        if not self._silent_since:
            self._silent_since = self.loop.time()
        if self._timer is None:
            self._start_timer(self._silence.in_progress)
        try:
            return ServerStream(self, self.http2.open_stream(), receiver)
        except Exception:
            self.transport.abort()  # nobody has the stream
            raise

    def give_back(self) -> None:
        """Give back what the connection holds, once it is closed and none of its streams is used.

        What was received before that is counted until it is read.
        """
        if self.closed and not self.handlers:
            self.buffers.release()

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

    def give_up(self, stream: Stream) -> None:
        """Doubt the connection, as the user of a stream waits no longer for its response.

        If the server has sent nothing for a while, it is asked for a sign of life. New calls go
        elsewhere if it was asked before and has responded to no call since, or if it does not let
        the gateway send the request: PINGs are answered in spite of that.
        """
        self._owes_response = True
        silence = self.loop.time() - self._silent_since
        if self._is_checked or silence < self._silence.given_up:
            return
        is_stuck = not stream.sent_end and not self.http2.sendable(stream)
        if self._was_pinged or is_stuck:
            self.retire()
        else:
            self._ping()

    def after_timeout(self) -> None:
        """Send new calls elsewhere if it may be this connection on which a call has timed out."""
        if self._owes_response:
            self.retire()

    def retire(self) -> None:
        """Take no more calls; the connection closes as soon as it has none."""
        self._is_retired = True
        self._owner.on_leaving(self)
        if not self.handlers:
            self.shut_down()

    def _ping(self) -> None:
        self._is_checked = self._was_pinged = True
        self.http2.ping(_PING)
        self.flush_soon()
        self._start_timer(self._silence.ping)

    def _check_silence(self) -> None:
        """Ask a server for a sign of life that is silent while calls wait for it."""
        self._timer = None
        if self._is_checked:
            self.retire()
        elif self.http2.streams and not self._is_retired:
            most = self._silence.in_progress
            left = self._silent_since + most - self.loop.time()
            if left <= 0 and not self._was_pinged:
                self._ping()
            else:
                self._start_timer(left if left > 0 else most)

    def _start_timer(self, delay: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay, self.run_guarded, self._check_silence)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def shut_down(self) -> None:
        """Close a connection without streams."""
        self.run_guarded(self._close_transport)

    def _close_transport(self) -> None:
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
        if self._is_connected:
            self.transport.abort()
        else:
            # uvloop does not end the transport of a cancelled connect, and the reference cycle with
            # the connection would stay.
            self.connection_made(ClosedTransport())
        forget(self.ready)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings, and let the kernel find out if the server is gone."""
        self.transport = cast("asyncio.Transport", transport)  # for ``drop``, whatever fails
        sock = transport.get_extra_info("socket")
        self._is_connected = sock is not None
        if sock is not None and sock.family != socket.AF_UNIX:
            _watch_for_death(sock)
        super().connection_made(transport)

    def data_received(self, data: bytes | memoryview) -> None:
        """Process frames of the server; its first bytes tell whether they are some."""
        if not self.ready.done():
            self._first += data[: len(_HTTP_1) - len(self._first)]
        self._silent_since = self.loop.time()
        was_checked, self._is_checked = self._is_checked, False
        super().data_received(data)
        if not self.http2.streams:
            self._silent_since = 0.0
        if was_checked:
            self._start_timer(self._silence.in_progress)
            self._owner.on_capacity()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all streams that are not complete."""
        try:
            self.receive_rest(exc)
            self._stop_timer()
            super().connection_lost(exc)
            self._fail_after(exc)
        except Exception:
            _log.exception("an HTTP/2 connection to %s ended with an error", self._server.url)
            self._fail_all(self._error(ErrorKind.NO_RESPONSE, "closed the connection"))
        finally:
            self.closed = True
            self.give_back()
            self._owner.on_leaving(self)

    def _fail_after(self, exc: Exception | None) -> None:
        """Fail all streams with what the end of the connection means for them."""
        refused = describe_certificate_refusal(exc)
        if not self.ready.done() or refused:
            why = refused or self._no_http2() or _NO_SETTINGS
            self._fail_all(self._error(ErrorKind.UNREACHABLE, why))
        else:
            for handler in self.handlers:
                kind, when = _progress(handler)
                self._fail_soon(handler, self._error(kind, f"closed the connection {when}"))

    def on_headers(self, event: HeadersReceived) -> None:
        """Give a stream the headers of its response."""
        self._note_response()
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
        self._note_response()
        assert isinstance(handler, ServerStream)
        if event.end_stream:
            self._on_end(handler)
        elif handler.receiver is not None:
            handler.receiver.on_data(event.size)

    def on_reset(self, handler: StreamHandler, event: StreamReset) -> None:
        """Fail a stream that the server has reset, or on which it has broken the protocol."""
        self._note_response()
        error = event.error
        kind, when = _progress(handler)
        if not event.by_peer:
            kind, what = ErrorKind.BAD_RESPONSE, "sent an invalid HTTP/2 response"
        elif error.code is ErrorCode.REFUSED_STREAM and kind is ErrorKind.NO_RESPONSE:
            kind, what = ErrorKind.REFUSED, "did not process the request"
        else:
            what = f"broke off {when}"
        handler.fail(self._error(kind, f"{what}: {error.reason}"))
        self._owner.on_capacity()

    def on_goaway(self, event: GoAwayFrame) -> None:
        """Open no more streams; those that the server has accepted go on."""
        name = _ERROR_NAMES.get(event.error_code, f"error {event.error_code}")
        text = event.debug_data[:QUOTED_TEXT].decode(errors="replace")
        quoted = f": {shorten(escape_for_log(text), QUOTED_TEXT)}" if text else ""
        self._goaway = f"GOAWAY {name}{quoted}"
        self._owner.on_leaving(self)
        if not self.handlers:
            self.loop.call_soon(self.run_guarded, self.after_stream)

    def on_settings(self) -> None:
        """Take in the limits of the server.

        RFC 9113, section 6.5.2: a server should allow no streams for a short time only. Until it
        allows some, it has the time of a connect; new calls on an older connection go elsewhere.
        """
        if self.max_streams <= 0:
            if self.ready.done():
                self.retire()
        elif self.ready.done():
            self._owner.on_capacity()
        else:
            self.ready.set_result(None)

    def on_failure(self, error: Http2Error) -> None:
        """Fail all streams, as the server does not speak HTTP/2 as it should."""
        self._owner.on_leaving(self)
        if not self.ready.done():
            reason = f"it does not speak HTTP/2: {error.reason}{_HTTP_1_ADDRESS}"
            why = self._no_http2() or reason
            self._fail_all(self._error(ErrorKind.UNREACHABLE, why))
        else:
            why = f"broke the HTTP/2 protocol: {error.reason}"
            self._fail_all(self._error(ErrorKind.BAD_RESPONSE, why))

    def _note_response(self) -> None:
        self._owes_response = self._was_pinged = False

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
        for handler in self.handlers:
            self._fail_soon(handler, error)

    def _fail_soon(self, handler: StreamHandler, error: GatewayError) -> None:
        """Fail a stream in a callback of its own: whatever its user does, the others fail, too."""
        self.loop.call_soon(handler.fail, error)

    def _error(self, kind: ErrorKind, why: str) -> GatewayError:
        """Make an error that names the server; operators also see why it went away."""
        start, middle = ("cannot connect to ", ": ") if kind is ErrorKind.UNREACHABLE else ("", " ")
        goaway = f" ({self._goaway})" if self._goaway else ""
        public_message = f"{start}{self._server.public}{middle}{why}"
        message = f"{start}{self._server.url}{middle}{why}{goaway}"
        return GatewayError(kind, message, public_message=public_message)


def _progress(handler: StreamHandler) -> tuple[ErrorKind, str]:
    """Return what it means that a stream ends now, and when that is."""
    if handler.stream.has_headers:
        return ErrorKind.BAD_RESPONSE, "before the end of its response"
    return ErrorKind.NO_RESPONSE, "before it responded"


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
