"""A client's connection: parses requests and serves them in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.http1.body import BodyDecoder, ChunkedDecoder, LengthDecoder
from gateway.http1.connection import HEAD_COPIES, Http1Body, Http1Connection
from gateway.http1.head import (
    MAX_CACHED_HEAD,
    STATUSES_WITHOUT_BODY,
    AnotherProtocolError,
    MalformedError,
    RequestHead,
)
from gateway.http1.head_reader import RequestHeadReader
from gateway.http2.frames import PREFACE
from gateway.listener.client_shares import client_of
from gateway.listener.connection_host import (
    CLIENT_CLOSED,
    NO_RECORD,
    Call,
    ConnectionHost,
    Continuation,
    DeferredCall,
    UnreadCheck,
    seconds_stalled,
    stalled_body_error,
    unread_response_error,
)
from gateway.listener.http2_connection import Http2ClientConnection
from gateway.listener.messages import (
    HttpRequest,
    HttpResponse,
    ListenerResponse,
    encode_error,
    encode_response,
    expects_continue,
    with_request_id,
)
from gateway.observe.call_record import CallRecord
from gateway.observe.failure_log import REFUSAL_LOG
from gateway.proxy.admission.concurrency_limit import overload_error
from gateway.proxy.calls.buffered import BufferedCall
from gateway.proxy.errors import error_body
from gateway.proxy.filters.forwarded_headers import ForwardedHeaders, Peer
from gateway.proxy.interfaces import FieldLines, HeaderLines, ResponseTemplate
from gateway.system.buffers import NO_ROOM, ReservedBytes
from gateway.system.tls_transport import ALPN_PROTOCOL

_MIN_PREFACE = len(b"PRI")
"""Bytes of the preface of HTTP/2 after which no method of HTTP/1.1 begins like it."""

_log = logging.getLogger("tensorgate.listener")


class ClientConnection(Http1Connection):
    """Parses the requests of a client; each gets its response before the next one starts.

    It is the FastPathClient of its calls on the fast path.
    """

    def __init__(self, host: ConnectionHost, is_unix: bool = False, is_tls: bool = False) -> None:
        super().__init__(host.buffers, host.hangups)
        self.buffers.drop_head = self._drop_head
        self.buffers.stall_error = stalled_body_error
        self._host = host
        self._is_unix = is_unix
        self._is_tls = is_tls
        self._reader = RequestHeadReader()
        self._head: RequestHead | None = None
        self.added_headers: HeaderLines = ()
        self.added_lines = b""
        self.carries_trailers = False
        self.record = NO_RECORD
        self._body: Http1Body | None = None
        self._decoder: BodyDecoder = LengthDecoder(0)
        self._call: Call | None = None
        self._framing_lost = False
        self._closing = False
        self._linger_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._unread = UnreadCheck()
        self._may_be_http2 = True

    @property
    def reserved(self) -> ReservedBytes:
        """Return what the current call has reserved."""
        return self.record.reserved

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
        self._peer = Peer(address, self._is_unix, self._is_tls)
        self.buffers.client = client_of(name)
        self._forwarded_headers = ForwardedHeaders(self._host.forwarding, self._peer)
        self._idle_since = self.loop.time()
        if self._is_tls and transport.get_extra_info(ALPN_PROTOCOL) == "h2":
            self._hand_over(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back what the connection holds; cancel its call, since its client is gone."""
        self.buffers.release()
        self._host.remove_connection(self)
        super().connection_lost(exc)
        self.discard_read_ahead()
        if self._body is not None:
            self._body.discard()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        call = self._call
        if call is None:
            return
        self.record.error = self.record.error or CLIENT_CLOSED
        try:
            call.cancel()
        finally:
            if isinstance(call, BufferedCall | DeferredCall):
                self._end_call()

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
            elif self._body is not None and not self._body.ended:
                self._receive_body(self._body, data)
                if self._is_lingering():
                    self.defer_next_drop()
            elif self._body is None and self._call is None and not self.write_blocked:
                self._receive_head(data)
            else:
                self.buffer_read_ahead(data)  # the next request waits for this response
        except Exception:
            # A bug of the gateway: log it, and go on serving other clients.
            _log.exception("the connection of %s failed", self._peer.address or "a client")
            self.reset()

    def _is_lingering(self) -> bool:
        """Tell whether the client goes on with a request whose response it has already."""
        return self._call is None and self._body is not None

    def finish_call(self, response: ListenerResponse) -> None:
        """Go on to the next request, or close the connection."""
        self._end_call()
        if self.closed or self._body is None:
            return
        # A client that does not know of the drain may send its next request: close_for_drain.
        if not response.finished or response.last or self._framing_lost:
            self.close()
            return
        self._body.discard()  # its reader is done
        if self._body.ended:
            self._await_next_request()
        else:
            self._idle_since = self.loop.time()
            timeout = self._host.idle_timeouts.linger_timeout
            self._linger_timer = self.loop.call_later(timeout, self.close)

    def respond(
        self,
        template: ResponseTemplate,
        lines: bytes,
        body: bytes | memoryview,
        *,
        last: bool = False,
        trailers: FieldLines = (),
    ) -> None:
        """Send the response of the current call; see FastPathClient."""
        assert self._head is not None
        last = last or not self._head.keep_alive or self._host.draining
        if self.record.request_id:
            lines = with_request_id(lines, self.record.request_id)
        self.write(*encode_response(template, lines, body, last))
        self.record.status = template.status
        if template.status not in STATUSES_WITHOUT_BODY:
            self.record.response_bytes = len(body)
        self._end_call()
        if last:
            self.close()
        else:
            self._await_next_request()

    def continue_in_task(self, rest: Continuation, on_done: Callable[[], None]) -> None:
        """Run the rest of the current call in a task; see FastPathClient."""
        assert self._head is not None
        assert isinstance(self._call, BufferedCall)
        fast_path_call = self._call
        body = self._body = Http1Body(self.read_flow, self.buffers, self.record.reserved)
        body.end()
        self._start_task(self._head, body, rest).add_done_callback(lambda _: on_done())
        # Only now, so that the host always counts one of the two.
        self._host.remove_call(fast_path_call)

    def drop_call(self) -> None:
        """Reset the connection, which cancels the call."""
        self.reset()

    def drop_unread(self) -> None:
        """Drop the connection, as its client does not read, and others need the room."""
        error = unread_response_error()
        if self._call is None:
            _log.info("connection of %s reset: %s", self._peer.address or "a client", error.message)
        else:
            self.record.set_abort(error)
        super().drop_unread()

    def announce_drain(self) -> None:
        """Do nothing: the next response tells the client."""

    @property
    def has_sent_all(self) -> bool:
        """Whether the whole request of its call is there."""
        return self._body is None or self._body.ended

    @property
    def is_idle(self) -> bool:
        """Whether there is no call, though perhaps a part of a request's head."""
        return self._call is None

    def seconds_stalled(self, now: float) -> float:
        """Return for how many seconds its call has waited for the client; 0 if it does not."""
        return max((seconds_stalled(body, now) for body in self.buffers.bodies), default=0.0)

    def drop(self, why: str) -> None:
        """Reset the connection; ``why`` is the error of its call."""
        if self._call is not None:
            self.record.error = self.record.error or why
        self._write_buffer = b""
        self._abort_with_reset()

    def close_if_idle(self) -> None:
        """Close the connection if it was without a request for too long.

        The rest of a response is dropped if the client has read none of it for too long.
        """
        if self._call is not None:
            return
        now, timeouts = self.loop.time(), self._host.idle_timeouts
        if self._unread.seconds(self.unsent, now) >= timeouts.idle_timeout:
            self._abort_with_reset()
        if self._closing:
            return
        idle = now - self._idle_since
        if not self._reader.started:
            if idle >= timeouts.keep_alive_timeout and not self._read_ahead:
                self.close()
        elif idle >= timeouts.request_header_timeout:
            limit = timeouts.request_header_timeout
            message = f"the head of the request did not arrive within {limit:g} s"
            message += " (limits.request_header_timeout)"
            self._reject(GatewayError(ErrorKind.CLIENT_TIMEOUT, message))

    def close_for_drain(self, grace: float) -> None:
        """Close the connection if it was idle for ``grace`` seconds; see ``drain``."""
        if self._call is not None or self.loop.time() - self._idle_since < grace:
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
        unread = bool(self._read_ahead) or (self._body and not self._body.ended)
        may_send = draining or self._framing_lost or unread
        if not may_send or not self.transport.can_write_eof():
            self.transport.close()
            return
        # Closing with unread bytes resets the connection, and the client may lose the response
        # (RFC 9112, section 9.6). So close only the sending side first.
        if not self.close_output():
            return
        self.discard_read_ahead()
        if self._body is not None:
            self._body.discard()
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
        self._head = head
        self._start_call(head, found[1], is_small)

    def _hand_over(self, received: bytes) -> None:
        """Let the connection be served over HTTP/2."""
        self._closing = True
        self._reader.reset()
        self.buffers.release()
        self.read_flow.close()
        Http2ClientConnection(self._host, self._peer).take_over(self, self.buffers.client, received)

    def _await_rest_of_head(self) -> None:
        """Count a partial head; empty lines before a head do not extend the idle time."""
        if not self._reader.started:
            return
        if not self._head_size:
            self._idle_since = self.loop.time()
        self._hold_head(self._reader.size)

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
        if self._call is None:
            self._reject(error)
        else:
            self._count_head(0)
            self.record.set_error(error)
            self.drop_call()

    def _start_call(self, head: RequestHead, data: bytes | memoryview, is_small: bool) -> None:
        started = time.perf_counter()
        self._may_be_http2 = False
        if self._forwarded_headers.forwarding is not self._host.forwarding:
            self._forwarded_headers = ForwardedHeaders(self._host.forwarding, self._peer)
        self.added_headers, self.added_lines, request_id = self._forwarded_headers.make(head)
        record = self.record = CallRecord(head.method, head.target, request_id, started)
        record.client = self._peer.address or ""
        record.reserved.client = self.buffers.client
        record.noted = head.noted
        sampler = self._host.trace_sampler
        if sampler is not None:
            record.trace = sampler.sample(head, self._peer, "1.1")
        may_be_fast = is_small and not head.http_1_0
        if may_be_fast and len(data) == head.length:
            record.request_bytes = len(data)
            if self._start_fast_path(head, data):
                return
            record.request_bytes = 0  # its body is read anew
            may_be_fast = False
        body = self._body = Http1Body(self.read_flow, self.buffers, self.record.reserved)
        self._decoder = ChunkedDecoder() if head.length is None else LengthDecoder(head.length)
        may_be_fast = may_be_fast and head.length is not None
        labels = self._host.fast_path_labels(head) if may_be_fast else None
        if labels is not None:
            record.labels = labels
            deferred = self._call = DeferredCall(self)
            self._host.add_call(deferred, self)
            self._host.deferrals.add(deferred, head.length)
        else:
            self._start_task(head, body)
        self._receive_body(body, data)

    def _start_fast_path(self, head: RequestHead, data: bytes | memoryview) -> bool:
        """Start a call on the fast path; False if it must be streamed."""
        call = self._call = self._host.prepare_fast_path(self, head, data)
        if call is None:
            return False
        self._host.add_call(call, self)
        call.start()
        return True

    def start_deferred_task(self) -> None:
        """Start the deferred call on the streaming path."""
        assert self._head is not None
        assert self._body is not None
        self._end_deferral()
        self._start_task(self._head, self._body)

    def _start_deferred_call(self, body: Http1Body) -> None:
        """Start the deferred call, as its body is there."""
        assert self._head is not None
        self._end_deferral()
        if self.write_blocked:
            self._start_task(self._head, body)
            return
        data = body.take()
        self._body = None
        if not self._start_fast_path(self._head, data):
            body = self._body = Http1Body(self.read_flow, self.buffers, self.record.reserved)
            body.feed(data, last=True)
            body.end()
            self._start_task(self._head, body)

    def _end_deferral(self) -> None:
        deferred, self._call = self._call, None
        assert isinstance(deferred, DeferredCall)
        self._host.deferrals.remove(deferred)
        self._host.remove_call(deferred)

    def _start_task(
        self, head: RequestHead, body: Http1Body, rest: Continuation | None = None
    ) -> asyncio.Task[None]:
        request = HttpRequest(head, body, self, self.added_headers)
        response = HttpResponse(
            head, self, lambda: self._closes_after_response(head, body), self.record
        )
        task = self._call = self._host.start_task(self, request, response, rest)
        task.add_done_callback(self._end_cancelled_task)
        return task

    def _end_cancelled_task(self, task: asyncio.Task[None]) -> None:
        """End the call of a task that was cancelled before it ran: it called no ``finish_call``."""
        if self._call is task:
            self._end_call()

    def _end_call(self) -> None:
        """Give back what the call holds, then tell of its end."""
        call = self._call
        if isinstance(call, BufferedCall | DeferredCall):
            self._host.remove_call(call)
        if isinstance(call, DeferredCall):
            self._host.deferrals.remove(call)
        self._call = None
        record = self.record
        # The clock of uvloop counts whole milliseconds.
        record.seconds = time.perf_counter() - record.started
        if self._head_size:
            # The next request may not come for a long time.
            self._head, self.added_headers, self.record = None, (), NO_RECORD
            self._count_head(0)
        self._unread.reset()
        self._host.observe_call(record)

    def _closes_after_response(self, head: RequestHead, body: Http1Body) -> bool:
        """Whether the connection must close after the response that starts now."""
        if not head.keep_alive or self._framing_lost or self._host.draining:
            return True
        # With Expect: 100-continue, the next bytes may be the body or the next request.
        return not body.ended and expects_continue(head)

    def _receive_body(self, body: Http1Body, data: bytes | memoryview) -> None:
        decoder = self._decoder
        try:
            piece = decoder.feed(data)
        except MalformedError as error:
            self._framing_lost = True
            body.fail_body(bad_request(f"the request body is malformed: {error}"))
            return
        if piece:
            self.record.request_bytes += len(piece)
            body.feed(piece, last=decoder.ended)
        rest, decoder.rest = decoder.rest, b""
        if decoder.ended:
            body.end()
            self.buffer_read_ahead(rest)
            if self._call is None:
                self._await_next_request()
            elif isinstance(self._call, DeferredCall):
                self._start_deferred_call(body)
            return
        if body.is_full and isinstance(self._call, DeferredCall):
            self.start_deferred_task()  # nothing more is read before it reads
        if rest:
            self.defer_read_ahead(rest)

    def _await_next_request(self) -> None:
        """Start to wait for the next request, which may be buffered already."""
        self._body = None
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        self._idle_since = self.loop.time()
        if self._read_ahead and not self.write_blocked:
            self.process_read_ahead()

    def resume_writing(self) -> None:
        """Go on to the next request, which has waited until the client read the responses."""
        super().resume_writing()
        if self._read_ahead and self._call is None and self._body is None and not self.closed:
            self._idle_since = self.loop.time()
            self.await_time_slice(self.process_read_ahead)

    def _reject(self, error: GatewayError, responds: bool = True) -> None:
        """Respond to a request without a valid head, and close the connection.

        A client that has shown nothing of HTTP could not read a response. If it meant HTTP/2, it
        would take one for a frame: RFC 9113, section 3.4.
        """
        record = CallRecord("-", "-")
        record.seconds = self.loop.time() - self._idle_since if self._reader.started else 0.0
        record.client = self._peer.address or ""
        record.set_error(error)
        REFUSAL_LOG.warn(f"request of {record.client or 'a Unix socket'} refused", error.message)
        if responds:
            record.status = error.kind.value.status
            body = error_body(error.message)
            record.response_bytes = len(body)
            self.transport.write(encode_error(error, body))
        self._host.observe_call(record)
        self._framing_lost = True
        self._reader.reset()
        self._count_head(0)
        self.close()


def _is_http2(start: bytes) -> bool:
    """Whether a connection begins with the preface of HTTP/2: RFC 9113, section 3.4.

    The preface is no valid head. It may come in pieces; that the rest follows is checked later.
    """
    return len(start) >= _MIN_PREFACE and PREFACE.startswith(start[: len(PREFACE)])
