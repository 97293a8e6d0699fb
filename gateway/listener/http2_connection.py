"""A client's HTTP/2 connection: serves a call on each of its streams."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Final

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.http1.connection import HEAD_COPIES
from gateway.http1.deferrals import Arrivals
from gateway.http1.head import MAX_CACHED_HEAD, STATUSES_WITHOUT_BODY, MalformedError, RequestHead
from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.events import DataReceived, HeadersReceived, StreamReset
from gateway.http2.frames import GoAwayFrame
from gateway.http2.hpack import MAX_HEADER_LIST, Header, HeaderList
from gateway.http2.session import CONNECTION_WINDOW, STREAM_WINDOW, Http2Session, StreamHandler
from gateway.http2.stream import Stream
from gateway.listener.client_call import CallSource, ClientCall, RequestDispatcher
from gateway.listener.connection_host import (
    CLIENT_CLOSED,
    ListenerConnection,
    UnreadCheck,
    seconds_stalled,
    stalled_body_error,
    unread_response_error,
)
from gateway.listener.messages import (
    CONTINUE_FIELDS,
    Http2Response,
    ListenerRequest,
    ListenerResponse,
    encode_fields,
    encode_request_head,
    response_fields,
    split_request_head,
    with_request_id,
)
from gateway.observe.failure_log import REFUSAL_LOG
from gateway.protocol.grpc.framing import first_message_size
from gateway.proxy.admission.concurrency_limit import overload_error
from gateway.proxy.errors import end_dropped_call, is_grpc_content
from gateway.proxy.filters.forwarded_headers import Peer
from gateway.proxy.interfaces import ClientResponse, FieldLines, ResponseTemplate
from gateway.system.buffers import MAX_WINDOW, NO_ROOM, BodyProgress, ReservedBytes
from gateway.system.time_slices import split

MAX_STREAMS: Final = 100
"""Requests of one connection that may be in progress: RFC 9113, section 6.5.2, advises as many."""

MAX_LINGER_BYTES: Final = 64 * 1024 * 1024
"""Bytes that are dropped of all requests that linger on a connection: as many as the largest body
has by default."""

_MAX_FRAME: Final = STREAM_WINDOW
"""Bytes of a received frame: a stream's first window would allow no larger one."""

_MAX_DEFERRED: Final = STREAM_WINDOW // 2
"""Bytes of a body of unknown size that are waited for, if it does not begin as one of gRPC."""

_MAX_CACHED_HEADS: Final = 8
"""Parsed heads that a connection keeps, of at most MAX_CACHED_HEAD bytes each."""

_SENT_PIECE: Final = 64 * 1024
"""Bytes of the rest of a buffered response of which the client must read some in time."""

_UNSENT: Final = "unsent output"
"""The pauser of a connection whose client does not read while no memory is left."""

_HEAD: Final[Header] = (b":method", b"HEAD")

_log = logging.getLogger("tensorgate.listener")


class UnreadResponse:
    """A response that waits for its client to read; see ``Body``."""

    def __init__(self, stream: ClientStream) -> None:
        self._stream = stream

    @property
    def progress(self) -> BodyProgress:
        """Return how fast the client reads: the socket tells it while that is full."""
        return self._stream.session.output_progress or self._stream.sending

    @property
    def reserved(self) -> ReservedBytes:
        """Return what its call has reserved."""
        return self._stream.reserved

    def may_pause(self) -> bool:
        """Tell whether its client may pause: not with bytes to read."""
        return False

    def is_reading(self) -> bool:
        """Tell whether the gateway learns what the client has read."""
        return self._stream.is_reading()

    def fail_body(self, error: Exception) -> None:
        """Drop the call."""
        self._stream.drop_unread()


class ClientStream(StreamHandler):
    """The stream of a client's ``call``, as long as that goes on."""

    def __init__(self, connection: Http2ClientConnection, stream: Stream, call: Http2Call) -> None:
        super().__init__(connection, stream)
        self.call: Http2Call | None = call
        self.rest_size = 0
        """Bytes of the rest of a buffered response, all of which wait for the client."""
        self._connection = connection
        self.unread: UnreadResponse | None = None

    def give_back(self) -> None:
        """Give back what the stream holds; its call has ended."""
        self.call = None
        super().give_back()

    def may_pause(self) -> bool:
        """Tell whether its client may have nothing to say for a while; see ``Body``."""
        return self.call is not None and self.call.is_grpc

    def end_incomplete(self) -> None:
        """Let the client end its request after a complete response; else reset the stream."""
        if self.stream.sent_end:
            self._connection.linger(self.stream)
        else:
            super().end_incomplete()

    def open_unread(self, size: int) -> None:
        """Let the response make room for others while it waits for its client."""
        self.unread = UnreadResponse(self)
        self.session.buffers.open_stream(self.unread, size + self.rest_size)

    def close_unread(self) -> None:
        """Let it do so no more."""
        unread, self.unread = self.unread, None
        if unread is not None:
            self.session.buffers.close_stream(unread)

    def drop_unread(self) -> None:
        """Drop the call because others need the room, and its client does not read."""
        self.close_unread()
        if self.call is not None:
            self.call.record.set_abort(unread_response_error())
            self.call.drop_call()


class Http2Call(ClientCall):
    """The call of a stream."""

    def __init__(
        self, connection: Http2ClientConnection, stream: Stream, headers: HeaderList
    ) -> None:
        super().__init__(connection.source, time.perf_counter())
        self._connection = connection
        self._headers = headers
        self.stream = ClientStream(connection, stream, self)
        self.head_size = 0
        """Bytes that a large head counts."""
        self._request_bytes = 0
        self._arrivals: Arrivals | None = None
        self._first_message_size = 0
        """Bytes of the first message of a gRPC call, with its prefix; 0 before that is there."""

    @property
    def is_grpc(self) -> bool:
        """Whether it is a call of gRPC."""
        fields = self._headers.fields
        return any(name == b"content-type" and is_grpc_content(value) for name, value in fields)

    @property
    def has_sent_all(self) -> bool:
        """Whether the whole request is there."""
        return self.stream.received_end

    @property
    def is_client_slow(self) -> bool:
        """Whether a response could not be sent at once."""
        stream = self.stream
        return stream.session.write_blocked or not stream.session.http2.sendable(stream.stream)

    def start(self) -> None:
        """Start the call: on the fast path if its whole body came together with its headers."""
        if self.ended:
            return  # it was reset at once
        headers, is_complete = self._headers, self.stream.received_end
        if headers.too_large:
            message = f"the headers of the request have more than {MAX_HEADER_LIST} bytes"
            self.reject(GatewayError(ErrorKind.HEAD_TOO_LARGE, message))
            return
        body_size = self._request_bytes if is_complete else -1
        is_small = True
        key, noted = split_request_head(headers, body_size, self._host.head_parser.noted_names)
        try:
            head = self._connection.cached_head(key, noted)
            if head is None:
                encoded = encode_request_head(headers, body_size)
                is_small = len(encoded) <= MAX_CACHED_HEAD
                if not is_small and not self._hold_head(HEAD_COPIES * len(encoded)):
                    return
                head = self._connection.parse_head(key, encoded)
        except MalformedError as error:
            self.reject(bad_request(f"malformed HTTP request: {error}"))
            return
        self.begin(head).request_bytes = self._request_bytes
        self.stream.reserved = self.reserved
        if is_small and is_complete:
            self.start_complete(self.stream)
        elif is_small and not self.is_client_slow and self._fits_in_window and self.defer():
            self.stream.open_window()
        else:
            self.start_task()

    @property
    def expected_size(self) -> int | None:
        """The bytes of the whole body: gRPC tells those of the message that it begins with."""
        size = super().expected_size
        return self._first_message_size or None if size is None else size

    @property
    def _fits_in_window(self) -> bool:
        """Whether the whole body may be waited for, as far as is known."""
        size, received = self.expected_size, self._request_bytes
        if size is None:
            return received <= _MAX_DEFERRED
        return received <= size <= self.stream.session.buffers.account.window

    def count_received(self, data: bytes | memoryview) -> None:
        """Count a piece of the body, which may be the last one."""
        is_first = not self._request_bytes
        if is_first:
            self._first_message_size = first_message_size(data)
        self._request_bytes += len(data)
        if self.head is None:
            return
        self.record.request_bytes = self._request_bytes
        if not self.is_deferred:
            return
        if self.stream.received_end:
            self.end_deferral()
            self.start_complete(self.stream)
        elif not self._fits_in_window:
            self.start_deferred_task()
        elif is_first:
            self._host.deferrals.shorten(self, self.expected_size or 0)

    def on_timeout(self) -> None:
        """Wait no longer for the rest of the body, unless it keeps coming; see TimeoutListener."""
        if self._arrivals is None:
            self._arrivals = Arrivals(self._started)
        if self._arrivals.renew(self._request_bytes):
            self._host.deferrals.add(self, self.expected_size)
        else:
            super().on_timeout()

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
        record, stream = self.record, self.stream
        if self.head is None and _HEAD in self._headers.fields:
            body = b""
        if record.request_id:
            lines = with_request_id(lines, record.request_id)
        has_body = bool(body) and template.status not in STATUSES_WITHOUT_BODY
        fields = response_fields(template, lines, len(body))
        stream.send_headers(fields, end_stream=not (has_body or trailers))
        if record.grpc_status < 0:
            record.status = template.status
        sent = 0
        if has_body:
            session = stream.session
            if not session.write_blocked:
                sent = session.http2.send_data(stream.stream, body, end_stream=not trailers)
            record.response_bytes = sent
            stream.sending.receive(sent, self.reserved.progress)
            if sent < len(body) and not stream.stream.closed:
                session.flush_soon(sent)
                self._send_rest(memoryview(body)[sent:], trailers)
                return
        if trailers:
            stream.send_headers(trailers, end_stream=True)
        stream.session.flush_soon(sent)
        self.end()

    def seconds_stalled(self, now: float) -> float:
        """Return for how many seconds the call has waited for the client; 0 if it does not."""
        stream = self.stream
        if stream.unread is not None:
            return seconds_stalled(stream.unread, now)
        # A stream of gRPC may be quiet after its first message.
        is_quiet = self.is_grpc and 0 < self._first_message_size <= self._request_bytes
        if is_quiet or stream not in stream.session.buffers.bodies:
            return 0.0
        return seconds_stalled(stream, now)

    def drop_call(self) -> None:
        """End the stream with an error, and cancel the call.

        A gRPC client gets the status UNAVAILABLE with the error of the record.
        """
        stream = self.stream
        if self.is_grpc:
            lines = end_dropped_call(self.record, stream.stream.sent_headers)
            stream.send_headers(tuple(encode_fields(lines)), end_stream=True)
        else:
            stream.reset(ErrorCode.INTERNAL_ERROR)
        self.cancel("")

    def drop_head(self) -> None:
        """Drop the call because others need the room that its head takes."""
        self._release_head()
        self.record.set_error(overload_error(NO_ROOM))
        self.drop_call()

    def cancel(self, why: str) -> None:
        """Cancel the call, as its client is gone."""
        if self.head is None and not self.ended:
            # The fields of a list that is too large were not checked.
            fields = {} if self._headers.too_large else dict(self._headers.fields)
            self.make_record(
                fields.get(b":method", b"-").decode("latin-1"),
                fields.get(b":path", b"-").decode("latin-1"),
            )
        super().cancel(why)

    def end(self) -> None:
        """Give back what the call holds, then tell of its end."""
        super().end()
        self._connection.on_call_end()

    def send_continue(self) -> None:
        """Tell the client to send its body."""
        self.stream.send_headers(CONTINUE_FIELDS)

    def _make_messages(self) -> tuple[ListenerRequest, ListenerResponse]:
        if self.head is None:  # it was rejected
            text = b"GET / HTTP/1.1\r\nHost: \r\n\r\n"
            self.head = self._host.head_parser.parse_request(text)
        request = ListenerRequest(self.head, self.stream, self, self.send_continue)
        return request, Http2Response(self.head, self.stream, self.record)

    def _send_rest(self, body: memoryview, trailers: FieldLines) -> None:
        """Send the rest of a response in a task, as the client reads it."""
        record, stream = self.record, self.stream
        idle_timeout = self._host.idle_timeouts.idle_timeout
        grpc_status = record.grpc_status
        record.grpc_status = -1  # until its client has the trailers

        async def send(response: ClientResponse) -> None:
            response.started = True
            buffers = stream.session.buffers
            buffers.change(len(body))
            stream.rest_size = len(body)
            left = len(body)
            try:
                for piece in split(body, _SENT_PIECE):
                    left -= len(piece)
                    async with asyncio.timeout(idle_timeout):
                        await stream.send(piece, not (left or trailers), is_counted=True)
                    record.response_bytes += len(piece)
                if trailers:
                    stream.send_headers(trailers, end_stream=True)
                record.grpc_status = grpc_status
            except TimeoutError:
                record.error = (
                    f"waiting for the client: nothing moved for {idle_timeout:g} s"
                    " (limits.idle_timeout)"
                )
                stream.reset(ErrorCode.CANCEL)
            finally:
                buffers.change(-len(body))

        self.start_task(send)

    def _hold_head(self, size: int) -> bool:
        """Count a large head before it is parsed; if there is no room, reject it."""
        if self.stream.session.buffers.hold_head(size):
            self.head_size = size
            return True
        self.reject(overload_error(NO_ROOM))
        return False

    def _release_head(self) -> None:
        if self.head_size:
            self.stream.session.buffers.change_heads(-self.head_size)
            self.head_size = 0

    def _release(self) -> None:
        self._release_head()
        self.stream.close()


class Http2ClientConnection(Http2Session):
    """Serves the requests of a client side by side."""

    def __init__(self, host: RequestDispatcher, peer: Peer) -> None:
        http2 = Http2Connection(
            is_client=False,
            max_streams=MAX_STREAMS,
            stream_window=STREAM_WINDOW,
            window=CONNECTION_WINDOW,
            max_frame_size=_MAX_FRAME,
        )
        super().__init__(http2, host.buffers, host.hangups)
        self.buffers.drop_head = self._drop_head
        self.buffers.stall_error = stalled_body_error
        self._host = host
        self.source = CallSource(host, peer, "", is_http2=True)
        self._heads: dict[tuple[object, ...], RequestHead] = {}
        self._begun: list[Http2Call] = []
        self._connected_at = self._idle_since = self.loop.time()
        self._partial_since = 0.0
        self._closing = False
        self._shut_down = False
        self._linger_timer: asyncio.TimerHandle | None = None
        self._lingering: dict[Stream, asyncio.TimerHandle] = {}
        """Streams whose response is complete while the client still sends, until their timeout."""
        self._dropped: dict[Stream, int] = {}
        """The bytes that were dropped of each of them."""
        self._unread = UnreadCheck()
        self._waits_for_client = False
        """Whether nothing is read and processed before the client reads."""

    def take_over(self, old: ListenerConnection, client: str, data: bytes) -> None:
        """Serve the transport of a connection of this client, which has received this data."""
        self._host.replace_connection(old, self)
        self.buffers.client = self.source.client = client
        transport = old.transport
        transport.set_protocol(self)
        self.connection_made(transport)
        if self._host.draining:
            self.announce_drain()
        if data:
            self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back what the connection holds; cancel its calls, since their client is gone."""
        self.buffers.release()
        self._host.remove_connection(self)
        try:
            super().connection_lost(exc)
            self._forget_lingering()
            if self._linger_timer is not None:
                self._linger_timer.cancel()
        finally:
            self._cancel_calls(CLIENT_CLOSED)

    def data_received(self, data: bytes | memoryview) -> None:
        """Process frames of the client, unless the connection is closing."""
        if self._closing:
            self.defer_next_drop()
        else:
            super().data_received(data)

    def process_received(self) -> None:
        """Process frames of a time slice; requests start when all of them are processed.

        If no memory is left, a client that does not read gets no further responses.
        """
        if self.write_blocked and self.buffers.account.free < 0:
            self._waits_for_client = True
            self.read_flow.pause(_UNSENT)
            self._count_unread(self.http2.reader.unread)
            return
        super().process_received()
        if not self._partial_size:
            self._partial_since = 0.0
        elif not self._partial_since:
            self._partial_since = self.loop.time()
        while self._begun:
            begun, self._begun = self._begun, []
            for call in begun:
                self._start_call(call)

    def resume_writing(self) -> None:
        """Let those who wait send, and process what the client has sent meanwhile."""
        super().resume_writing()
        if self._waits_for_client and not self.closed:
            self._waits_for_client = False
            self.read_flow.resume(_UNSENT)
            self.await_time_slice(self._use_time_slice)

    def _start_call(self, call: Http2Call) -> None:
        """Start a call; an unexpected error ends no other one."""
        try:
            call.start()
        except Exception:
            _log.exception("a request over HTTP/2 failed before its call had started")
            try:
                call.stream.reset(ErrorCode.INTERNAL_ERROR)
            finally:
                call.cancel("the gateway failed before the call had started")

    def fail(self, error: Http2Error) -> None:
        """Close the connection because the client broke the protocol, or a limit."""
        self.on_failure(error)
        self._close()

    def cached_head(
        self, key: tuple[object, ...], noted: list[str | bytes] | None
    ) -> RequestHead | None:
        """Return the head of a request if one was parsed with this key; see split_request_head."""
        head = self._heads.get(key)
        if head is None or head.parser is not self._host.head_parser or noted is None:
            return None
        return head.with_noted(noted)

    def parse_head(self, key: tuple[object, ...], encoded: bytes) -> RequestHead:
        """Return the head of a request, which ``encoded`` has in HTTP/1.1; cache a small one.

        Raises MalformedError.
        """
        head = self._host.head_parser.parse_request(encoded)
        if len(encoded) <= MAX_CACHED_HEAD:
            if len(self._heads) >= _MAX_CACHED_HEADS:
                self._heads.clear()
            self._heads[key] = head
        return head

    def on_headers(self, event: HeadersReceived) -> None:
        """Begin a call."""
        self._begun.append(Http2Call(self, event.stream, event.headers))

    def on_data(self, handler: StreamHandler, event: DataReceived) -> None:
        """Count a piece of a request's body; its trailers are for gRPC alone."""
        assert isinstance(handler, ClientStream)
        if handler.call is not None:
            handler.call.count_received(event.data)

    def on_reset(self, handler: StreamHandler, event: StreamReset) -> None:
        """Cancel the call of a stream."""
        if event.by_peer:
            why = f"the client reset the stream: {event.error.code.name}"
        else:
            self.on_refused(event.error)
            why = _protocol_error_text(event.error)
        assert isinstance(handler, ClientStream)
        if handler.call is not None:
            handler.call.cancel(why)

    def on_refused(self, error: Http2Error) -> None:
        """Log why a stream was reset."""
        self._log_refusal("stream", error)

    def _log_refusal(self, what: str, error: Http2Error) -> None:
        client = self.source.address or "a Unix socket"
        REFUSAL_LOG.warn(f"HTTP/2 {what} of {client} closed", f"{error.reason} ({error.code.name})")

    def on_unread(self, stream: Stream, size: int) -> None:
        """Count what was dropped of a stream that lingers, which may have ended with it."""
        if stream in self._lingering:
            self._dropped[stream] += size
            if stream.closed or sum(self._dropped.values()) > MAX_LINGER_BYTES:
                self._end_lingering(stream)

    def on_failure(self, error: Http2Error) -> None:
        """Cancel all calls, and log why the connection is closed."""
        self._log_refusal("connection", error)
        self._cancel_calls(_protocol_error_text(error))

    def on_goaway(self, event: GoAwayFrame) -> None:
        """Close the connection once its calls have ended, also those that follow in its packet."""
        self._shut_down = True
        self.loop.call_soon(self.run_guarded, self._close_if_done)

    def on_call_end(self) -> None:
        """Note the end of a call."""
        self._idle_since = self.loop.time()
        self.run_guarded(self._close_if_done)

    def linger(self, stream: Stream) -> None:
        """Let the client end a request whose response is complete; what it sends is dropped.

        RFC 9113, section 8.1, allows a reset right after the response, but clients then lose it:
        curl 7.88 reports a framing error. So a stream lingers for some time, and all of a
        connection for ``MAX_LINGER_BYTES``. It counts in MAX_CONCURRENT_STREAMS, and holds nothing
        else.
        """
        if not (self._closing or self.closed):
            timeout = self._host.idle_timeouts.linger_timeout
            self._dropped[stream] = 0
            self._lingering[stream] = self.loop.call_later(timeout, self._end_lingering, stream)
            # Dropped data take no memory, so the client need not wait for a small window.
            self.http2.set_stream_window(stream, MAX_WINDOW)
            self.flush_soon()

    def _end_lingering(self, stream: Stream) -> None:
        """Forget a stream, and reset it if its request is not complete."""
        self._lingering.pop(stream).cancel()
        del self._dropped[stream]
        self.http2.reset(stream, ErrorCode.NO_ERROR)
        self.flush_soon()
        self._close_if_done()  # it is idle since the response

    def _forget_lingering(self) -> None:
        for timer in self._lingering.values():
            timer.cancel()
        self._lingering.clear()
        self._dropped.clear()

    @property
    def is_idle(self) -> bool:
        """Whether there are no calls, and no requests that go on after their response."""
        return not (self.handlers or self._lingering)

    def seconds_stalled(self, now: float) -> float:
        """Return for how many seconds all its calls have waited for the client, 0 if one has not.

        Without a call, what comes belongs to requests that have their responses.
        """
        return min((call.seconds_stalled(now) for call in self._calls()), default=math.inf)

    def drop(self, why: str) -> None:
        """Reset the connection; ``why`` is the error of its calls."""
        self._cancel_calls(why)
        self._abort_with_reset()

    def close_if_idle(self) -> None:
        """Close the connection if its client has done nothing for too long."""
        now, timeouts = self.loop.time(), self._host.idle_timeouts
        header_timeout = timeouts.request_header_timeout
        if self._unread.seconds(self.transport.get_write_buffer_size(), now) >= (
            timeouts.idle_timeout
        ):
            self._cancel_calls(
                f"waiting for the client: nothing moved for {timeouts.idle_timeout:g} s"
                " (limits.idle_timeout)"
            )
            self._abort_with_reset()
        elif self._closing:
            pass
        elif not self.http2.settings_acknowledged and now - self._connected_at >= header_timeout:
            self._end(ErrorCode.SETTINGS_TIMEOUT, "SETTINGS were not acknowledged", header_timeout)
        elif self._partial_since and now - self._partial_since >= header_timeout:
            self._end(ErrorCode.ENHANCE_YOUR_CALM, "a frame did not arrive", header_timeout)
        elif self.is_idle and now - self._idle_since >= timeouts.keep_alive_timeout:
            self.http2.close(ErrorCode.NO_ERROR, "idle for too long")
            self._close()

    def drop_unread(self) -> None:
        """Drop the connection, as its client does not read, and others need the room."""
        error = unread_response_error()
        _log.info(
            "HTTP/2 connection of %s reset: %s", self.source.address or "a client", error.message
        )
        self._cancel_calls(error.message)
        super().drop_unread()

    def announce_drain(self) -> None:
        """Tell the client to open no more streams; those on their way are served."""
        if not self._closing:
            self.http2.announce_shutdown()
            self.flush_output()

    def close_for_drain(self, grace: float) -> None:
        """Accept no more streams, and close the connection once its calls have ended."""
        is_grace_over = self.loop.time() - self._idle_since >= grace
        if not self._closing:
            self._shut_down = True
            self.http2.shut_down()
            if is_grace_over:
                for stream in tuple(self._lingering):
                    self._end_lingering(stream)
            self.flush_output()
            self._close_if_done()
        elif is_grace_over and not self.transport.get_write_buffer_size():
            self.transport.abort()  # the client has all responses, but does not close its side

    def _end(self, code: ErrorCode, what: str, timeout: float) -> None:
        self.end_for(code, f"{what} within {timeout:g} s (limits.request_header_timeout)")

    def _calls(self) -> list[Http2Call]:
        return [
            each.call
            for each in self.handlers
            if isinstance(each, ClientStream) and each.call is not None
        ]

    def _cancel_calls(self, why: str) -> None:
        for call in self._calls():
            try:
                call.cancel(why)
            except Exception:
                # The other calls of the connection must end, too.
                _log.exception("a call over HTTP/2 could not be cancelled")

    def _count_partial(self, size: int) -> None:
        """Count the bytes of incomplete frames, which may be those of a head."""
        more = size - self._partial_size
        if more > 0 and not self.buffers.hold_head(more):
            self.end_for(ErrorCode.ENHANCE_YOUR_CALM, NO_ROOM)
            return
        if more < 0:
            self.buffers.change_heads(more)
        self._partial_size = size

    def _drop_head(self) -> None:
        """Drop the largest head, and the call that it begins: others need the room."""
        largest = max(self._calls(), key=lambda call: call.head_size, default=None)
        if largest is None or largest.head_size <= self._partial_size:
            self.end_for(ErrorCode.ENHANCE_YOUR_CALM, NO_ROOM)
        else:
            largest.drop_head()

    def _close_if_done(self) -> None:
        if self._shut_down and self.is_idle:
            self._close()

    def _close(self) -> None:
        """Close the connection once all is sent; the client may still be sending."""
        if self._closing or self.closed:
            return
        self.flush_output()
        self._closing = self._output_closed = True
        self.http2.ignore_received()
        self._forget_lingering()
        self._begun = []
        self._count_partial(0)
        self._idle_since = self.loop.time()
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        # Closing with unread bytes resets the connection, and the client may lose what was sent.
        if not self.close_output():
            return
        if not self._host.draining:
            timeout = self._host.idle_timeouts.linger_timeout
            self._linger_timer = self.loop.call_later(timeout, self.transport.abort)


def _protocol_error_text(error: Http2Error) -> str:
    return f"the client broke HTTP/2: {error.reason} ({error.code.name})"
