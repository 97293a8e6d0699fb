"""A client's connection: parses requests and serves them in order."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.http1.body import BodyDecoder, ChunkedDecoder, LengthDecoder
from gateway.http1.connection import HEAD_COPIES, Http1Body, Http1Connection, PlacedBody
from gateway.http1.head import (
    MAX_CACHED_HEAD,
    STATUSES_WITHOUT_BODY,
    AnotherProtocolError,
    HeadReader,
    MalformedError,
    RequestHead,
)
from gateway.http2.frames import PREFACE
from gateway.listener.client_call import CallSource, ClientCall, RequestDispatcher
from gateway.listener.client_shares import client_of
from gateway.listener.connection_host import (
    CLIENT_CLOSED,
    UnreadCheck,
    seconds_stalled,
    stalled_body_error,
    unread_response_error,
)
from gateway.listener.http2_connection import Http2ClientConnection
from gateway.listener.messages import (
    CONTINUE,
    HttpResponse,
    ListenerRequest,
    ListenerResponse,
    encode_response,
    expects_continue,
    with_request_id,
)
from gateway.protocol.messages import InferRequest
from gateway.proxy.admission.concurrency_limit import overload_error
from gateway.proxy.filters.forwarded_headers import Peer
from gateway.proxy.interfaces import FieldLines, ResponseTemplate
from gateway.system.buffers import NO_ROOM, NOTHING_RESERVED, ReservedBytes
from gateway.system.tls_transport import ALPN_PROTOCOL

_MIN_PREFACE: Final = len(b"PRI")
"""Bytes of the preface of HTTP/2 after which no method of HTTP/1.1 begins like it."""

_log = logging.getLogger("tensorgate.listener")


class Http1Call(ClientCall):
    """The call of a connection."""

    def __init__(self, connection: ClientConnection, started: float) -> None:
        super().__init__(connection.source, started)
        self._connection = connection

    @property
    def has_sent_all(self) -> bool:
        """Whether the whole request is there."""
        body = self._connection.body
        return body is None or body.ended

    @property
    def is_client_slow(self) -> bool:
        """Whether a response could not be sent at once."""
        return self._connection.write_blocked

    def respond(
        self,
        template: ResponseTemplate,
        lines: bytes,
        body: bytes | memoryview,
        *,
        last: bool = False,
        trailers: FieldLines = (),
    ) -> None:
        """Send the response; see FastPathClient."""
        connection, record = self._connection, self.record
        last = last or self._host.draining or (self.head is not None and not self.head.keep_alive)
        if record.request_id:
            lines = with_request_id(lines, record.request_id)
        connection.write(encode_response(template, lines, body, last))
        record.status = template.status
        if template.status not in STATUSES_WITHOUT_BODY:
            record.response_bytes = len(body)
        self.end()
        if last:
            connection.close()
        else:
            connection.await_next_request()

    def on_read(self, request: InferRequest | None) -> None:
        """Go on with a body that was read while it arrived; see BodyReading."""
        body = self._connection.body
        assert body is not None
        self.end_deferral()  # what is invalid may be found before all has come
        self.reading, self.infer_request = None, request
        if request is None:
            self.start_task()
        else:
            self.start_complete(body)

    def finish_call(self, response: ListenerResponse) -> None:
        """End the call; go on to the next request, or close the connection."""
        self.end()
        self._connection.after_response(is_last=response.last or not response.finished)

    def drop_call(self) -> None:
        """Reset the connection, which cancels the call."""
        self._connection.reset()

    def send_continue(self) -> None:
        """Tell the client to send its body."""
        self._connection.transport.write(CONTINUE)

    def _make_messages(self) -> tuple[ListenerRequest, ListenerResponse]:
        head, connection = self.head, self._connection
        assert head is not None
        body = connection.body
        if body is None:
            body = connection.body = connection.make_body(ended=True)
        request = ListenerRequest(head, body, self, self.send_continue)
        closes_after = connection.closes_after_response
        return request, HttpResponse(head, connection, closes_after, self.record)

    def _release(self) -> None:
        self._connection.forget_call()


class ClientConnection(Http1Connection):
    """Parses the requests of a client; each gets its response before the next one starts."""

    def __init__(
        self, host: RequestDispatcher, is_unix: bool = False, is_tls: bool = False
    ) -> None:
        super().__init__(host.buffers, host.hangups)
        self.buffers.drop_head = self._drop_head
        self.buffers.stall_error = stalled_body_error
        self._host = host
        self._is_unix = is_unix
        self._is_tls = is_tls
        self._reader = HeadReader(is_request=True)
        self.call: Http1Call | None = None
        self.body: Http1Body | None = None
        """The body of the call, or of one that has its response already."""
        self._decoder: BodyDecoder = LengthDecoder(0)
        self._framing_lost = False
        self._closing = False
        self._linger_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._unread = UnreadCheck()
        self._may_be_http2 = True
        self._placed: PlacedBody | None = None
        """The body whose memory was offered for a read."""

    @property
    def reserved(self) -> ReservedBytes:
        """Return what the current call has reserved."""
        return NOTHING_RESERVED if self.call is None else self.call.reserved

    @property
    def unsent(self) -> int:
        """The bytes that wait for the client to read."""
        return self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        super().connection_made(transport)
        self._host.add_connection(self)
        name = None if self._is_unix else transport.get_extra_info("peername")
        # A link-local address has its interface after a %, which means nothing to other hosts.
        address = name[0].partition("%")[0] if name else None
        peer = Peer(address, self._is_unix, self._is_tls)
        self.buffers.client = client_of(name)
        self.source = CallSource(self._host, peer, self.buffers.client, is_http2=False)
        self._idle_since = self.loop.time()
        if self._is_tls and transport.get_extra_info(ALPN_PROTOCOL) == "h2":
            self._hand_over(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back what the connection holds; cancel its call, since its client is gone."""
        self.buffers.release()
        self._host.remove_connection(self)
        super().connection_lost(exc)
        self.discard_read_ahead()
        if self.body is not None:
            self.body.discard()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        if self.call is not None:
            self.call.cancel(CLIENT_CLOSED)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next read: that of the body, if it has some."""
        body, self._placed = self.body, None  # a read that brings nothing is not told
        if isinstance(body, PlacedBody) and not body.ended and not self._read_ahead:
            space = body.space[: self.buffers.account.read_size]
            if space:
                self._offered_size = len(space)
                self._placed = body
                return space
        return super().get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes that were read."""
        body, self._placed = self._placed, None
        if body is None:
            super().buffer_updated(nbytes)
            return
        more_follows = nbytes == self._offered_size and nbytes < len(body.space)
        self.data_received(body.receive(nbytes))
        if more_follows:
            self.defer_next_read()

    def data_received(self, data: bytes | memoryview) -> None:
        """Process bytes from the client.

        It raises nothing: the caller may be the connection of a server, whose response has ended
        the call before.
        """
        if self._closing or self._framing_lost:
            self.defer_next_drop()
            return
        try:
            if self._read_ahead:
                self.buffer_read_ahead(data)
            elif self.body is not None and not self.body.ended:
                self._receive_body(self.body, data)
                if self._is_lingering():
                    self.defer_next_drop()
            elif self.body is None and self.call is None and not self.write_blocked:
                self._receive_head(data)
            else:
                self.buffer_read_ahead(data)  # the next request waits for this response
        except Exception:
            # A bug of the gateway: log it, and go on serving other clients.
            _log.exception("the connection of %s failed", self.source.address or "a client")
            self.reset()

    def _is_lingering(self) -> bool:
        """Tell whether the client goes on with a request whose response it has already."""
        return self.call is None and self.body is not None

    def after_response(self, *, is_last: bool) -> None:
        """Go on to the next request, or close the connection."""
        body = self.body
        if self.closed or body is None:
            return
        # A client that does not know of the drain may send its next request: close_for_drain.
        if is_last or self._framing_lost:
            self.close()
            return
        body.discard()  # its reader is done
        if body.ended:
            self.await_next_request()
        else:
            self._idle_since = self.loop.time()
            timeout = self._host.idle_timeouts.linger_timeout
            self._linger_timer = self.loop.call_later(timeout, self.close)

    def drop_unread(self) -> None:
        """Drop the connection, as its client does not read, and others need the room."""
        error = unread_response_error()
        if self.call is None:
            _log.info(
                "connection of %s reset: %s", self.source.address or "a client", error.message
            )
        else:
            self.call.record.set_abort(error)
        super().drop_unread()

    def announce_drain(self) -> None:
        """Do nothing: the next response tells the client."""

    @property
    def is_idle(self) -> bool:
        """Whether there is no call, though perhaps a part of a request's head."""
        return self.call is None

    def seconds_stalled(self, now: float) -> float:
        """Return for how many seconds its call has waited for the client; 0 if it does not."""
        return max((seconds_stalled(body, now) for body in self.buffers.bodies), default=0.0)

    def drop(self, why: str) -> None:
        """Reset the connection; ``why`` is the error of its call."""
        if self.call is not None:
            self.call.record.error = self.call.record.error or why
        self._write_buffer = b""
        self._abort_with_reset()

    def close_if_idle(self) -> None:
        """Close the connection if it was without a request for too long.

        The rest of a response is dropped if the client has read none of it for too long.
        """
        if self.call is not None:
            return
        now, timeouts = self.loop.time(), self._host.idle_timeouts
        if self._unread.seconds(self.unsent, now) >= timeouts.idle_timeout:
            self._abort_with_reset()
        if self._closing:
            return
        idle = now - self._idle_since
        if not self._reader.received:
            if idle >= timeouts.keep_alive_timeout and not self._read_ahead:
                self.close()
        elif idle >= timeouts.request_header_timeout:
            limit = timeouts.request_header_timeout
            message = f"the head of the request did not arrive within {limit:g} s"
            message += " (limits.request_header_timeout)"
            self._reject(GatewayError(ErrorKind.CLIENT_TIMEOUT, message))

    def close_for_drain(self, grace: float) -> None:
        """Close the connection if it was idle for ``grace`` seconds; see ``drain``."""
        if self.call is not None or self.loop.time() - self._idle_since < grace:
            return
        if not self._closing:
            self._closing = True
            self.transport.close()
        elif not self.unsent:
            self.transport.abort()  # the client has its response, but does not close its side

    def close(self) -> None:
        """Close the connection once all is sent; the client may still be sending."""
        if self._closing or self.closed:
            return
        self._closing = True
        self._idle_since = self.loop.time()
        draining = self._host.draining  # the client may not know, and send the next request
        unread = bool(self._read_ahead) or (self.body and not self.body.ended)
        may_send = draining or self._framing_lost or unread
        if not may_send or not self.transport.can_write_eof():
            self.transport.close()
            return
        # Closing with unread bytes resets the connection, and the client may lose the response
        # (RFC 9112, section 9.6). So close only the sending side first.
        if not self.close_output():
            return
        self.discard_read_ahead()
        if self.body is not None:
            self.body.discard()
        if not draining:
            timeout = self._host.idle_timeouts.linger_timeout
            self._linger_timer = self.loop.call_later(timeout, self.transport.abort)

    def _receive_head(self, data: bytes | memoryview) -> None:
        found: tuple[bytes, bytes | memoryview] | None = None
        try:
            found = self._reader.feed(data)
            if found is None:
                self._await_rest_of_head()
                return
            head = self._host.head_parser.parse_request(found[0])
        except MalformedError as error:
            received = self._reader.received if found is None else b"".join(found)
            if self._may_be_http2 and _is_http2(received):
                self._hand_over(received)
            else:
                self._reject(
                    bad_request(f"malformed HTTP request: {error}"),
                    responds=not (self._may_be_http2 and isinstance(error, AnotherProtocolError)),
                )
            return
        size = len(found[0])
        is_small = size <= MAX_CACHED_HEAD
        if not is_small:
            if not self._hold_head(HEAD_COPIES * size):
                return
        elif self._head_size:
            self._count_head(0)
        self._start_call(head, found[1], is_small)

    def _hand_over(self, received: bytes) -> None:
        """Let the connection be served over HTTP/2."""
        self._closing = True
        self._reader.reset()
        self.buffers.release()
        self.read_flow.close()
        Http2ClientConnection(self._host, self.source.peer).take_over(
            self, self.buffers.client, received
        )

    def _await_rest_of_head(self) -> None:
        """Count a partial head; empty lines before a head do not extend the idle time."""
        if not self._reader.received:
            return
        if not self._head_size:
            self._idle_since = self.loop.time()
        self._hold_head(len(self._reader.received))

    def _hold_head(self, size: int) -> bool:
        """Count a partial head, or the large head of a call; if there is no room, reject it."""
        if not self.buffers.hold_head(size - self._head_size):
            self._reject(overload_error(NO_ROOM))
            return False
        self._head_size = size
        return True

    def _count_head(self, size: int) -> None:
        self.buffers.change_heads(size - self._head_size)
        self._head_size = size

    def _drop_head(self) -> None:
        """Drop the head, and the call that it begins: others need the room."""
        error = overload_error(NO_ROOM)
        if self.call is None:
            self._reject(error)
        else:
            self._count_head(0)
            self.call.record.set_error(error)
            self.call.drop_call()

    def _start_call(self, head: RequestHead, data: bytes | memoryview, is_small: bool) -> None:
        self._may_be_http2 = False
        call = self.call = Http1Call(self, time.perf_counter())
        record = call.begin(head)
        may_be_fast = is_small and not head.http_1_0 and head.length is not None
        if may_be_fast and len(data) == head.length:
            record.request_bytes = len(data)
            if call.start_buffered(data):
                return
            record.request_bytes = 0  # its body is read anew
            may_be_fast = False
        if may_be_fast and (memory := call.place(call.on_read)) is not None:
            self.body = PlacedBody(self.read_flow, self.buffers, self.reserved, memory)
        body = self.body = self.body or self.make_body()
        self._decoder = ChunkedDecoder() if head.length is None else LengthDecoder(head.length)
        if not (may_be_fast and call.defer()):
            call.start_deferred_task()
        self._receive_body(body, data)

    def make_body(self, *, ended: bool = False) -> Http1Body:
        """Return the body of the call, which arrives unless it has ``ended``."""
        return Http1Body(self.read_flow, self.buffers, self.reserved, ended)

    def forget_call(self) -> None:
        """Note the end of the call."""
        self.call = None
        if self._head_size:  # the next request may not come for a long time
            self._count_head(0)
        self._unread.reset()

    def closes_after_response(self, head: RequestHead) -> bool:
        """Whether the connection must close after the response that starts now."""
        if not head.keep_alive or self._framing_lost or self._host.draining:
            return True
        # With Expect: 100-continue, the next bytes may be the body or the next request.
        return self.body is not None and not self.body.ended and expects_continue(head)

    def _receive_body(self, body: Http1Body, data: bytes | memoryview) -> None:
        decoder = self._decoder
        try:
            piece = decoder.feed(data)
        except MalformedError as error:
            self._framing_lost = True
            body.fail_body(bad_request(f"the request body is malformed: {error}"))
            return
        call = self.call
        if piece:
            if call is not None:
                call.on_received(len(piece))
            body.feed(piece, last=decoder.ended)
        rest, decoder.rest = decoder.rest, b""
        if decoder.ended:
            body.end()
            self.buffer_read_ahead(rest)
            if call is None:
                self.await_next_request()
            elif call.is_deferred:
                call.end_deferral()
                call.start_complete(body)
            return
        if body.is_full and call is not None and call.is_deferred:
            call.start_deferred_task()  # nothing more is read before it reads
        if rest:
            self.defer_read_ahead(rest)

    def await_next_request(self) -> None:
        """Start to wait for the next request, which may be buffered already."""
        self.body = None
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        self._idle_since = self.loop.time()
        if self._read_ahead and not self.write_blocked:
            self.process_read_ahead()

    def resume_writing(self) -> None:
        """Go on to the next request, which has waited until the client read the responses."""
        super().resume_writing()
        if self._read_ahead and self.call is None and self.body is None and not self.closed:
            self._idle_since = self.loop.time()
            self.await_time_slice(self.process_read_ahead)

    def _reject(self, error: GatewayError, responds: bool = True) -> None:
        """Respond to a request without a valid head, and close the connection.

        A client that has shown nothing of HTTP could not read a response. If it meant HTTP/2, it
        would take one for a frame: RFC 9113, section 3.4.
        """
        waited = self.loop.time() - self._idle_since if self._reader.received else 0.0
        self._framing_lost = True
        self._reader.reset()
        call = self.call = Http1Call(self, time.perf_counter() - waited)
        call.reject(error, responds=responds)
        self.close()


def _is_http2(start: bytes) -> bool:
    """Whether a connection begins with the preface of HTTP/2: RFC 9113, section 3.4.

    The preface is no valid head. It may come in pieces; that the rest follows is checked later.
    """
    return len(start) >= _MIN_PREFACE and PREFACE.startswith(start[: len(PREFACE)])
