"""One client's connection: its requests, one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from httptools import HttpRequestParser

from gateway.errors import bad_request
from gateway.http1.body import BodyDecoder, ChunkedDecoder, LengthDecoder
from gateway.http1.connection import HEAD_COPIES, BodyStream, Connection
from gateway.http1.head import (
    MAX_CACHED_HEAD,
    HeadReader,
    MalformedError,
    RequestHead,
    parse_request_head,
)
from gateway.listener.connection_host import ConnectionHost, Continuation
from gateway.listener.messages import (
    HttpRequest,
    HttpResponse,
    encode_error,
    encode_response,
    expects_continue,
)
from gateway.proxy.fast_path.call import FastPathCall
from gateway.proxy.filters.forwarded_headers import ForwardedHeaders, Peer
from gateway.proxy.interfaces import HeaderLines

_LINGER = 10.0
"""Seconds for what a client still sends after its answer."""


class ClientConnection(Connection):
    """Cuts requests out of what a client sends, and has each served before the next.

    It is the FastPathClient of one that goes straight.
    """

    def __init__(self, owner: ConnectionHost, is_unix: bool = False, is_tls: bool = False) -> None:
        super().__init__(owner.buffers, owner.hangups)
        self._owner = owner
        self._is_unix = is_unix
        self._is_tls = is_tls
        self._reader = HeadReader(HttpRequestParser)
        self._head: RequestHead | None = None
        self.added_headers: HeaderLines = ()
        self.request_id = ""
        self._body: BodyStream | None = None
        self._decoder: BodyDecoder = LengthDecoder(0)
        self._call: asyncio.Task[None] | FastPathCall | None = None
        self._broken = False
        self._closing = False
        self._linger: asyncio.TimerHandle | None = None
        self._quiet_since = 0.0
        self._left = 0
        self._left_since = 0.0
        self._began = 0.0

    @property
    def unsent(self) -> int:
        """Give the bytes that wait for the client to read."""
        return self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the connection."""
        super().connection_made(transport)
        name = None if self._is_unix else transport.get_extra_info("peername")
        # An address of one link names that behind a %, which says nothing elsewhere.
        address = name[0].partition("%")[0] if name else None
        self._peer = Peer(address, self._is_unix, self._is_tls)
        self._introduction = ForwardedHeaders(self._owner.forwarding, self._peer)
        self._quiet_since = self.loop.time()
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange under way: its client is gone."""
        super().connection_lost(exc)
        self.discard_read_ahead()
        if self._body is not None:
            self._body.discard()
        if self._linger is not None:
            self._linger.cancel()
        if self._call is not None:
            self._call.cancel()
            if isinstance(self._call, FastPathCall):
                self._note_answer(0, 0)
        self._owner.lost(self)

    def data_received(self, data: bytes | memoryview) -> None:
        """Take what the client sends."""
        if self._closing or self._broken:
            return
        if self._read_ahead:
            self.buffer_read_ahead(data)
        elif self._body is not None and not self._body.ended:
            self._take_body(self._body, data)
        elif self._body is None and self._call is None:
            self._take_head(data)
        else:
            self.buffer_read_ahead(data)  # the next request, which waits for this one's answer

    def answered(self, answer: HttpResponse) -> None:
        """Go on to the next request, or close."""
        self._note_answer(answer.status, answer.size)
        if self.closed or self._body is None:
            return
        # While draining too, a client that was not told may send its next request: see
        # close_for_drain.
        if not answer.finished or answer.last or self._broken:
            self.close()
            return
        self._body.discard()  # what nobody has read
        if self._body.ended:
            self._next()
        else:
            self._quiet_since = self.loop.time()
            self._linger = self.loop.call_later(_LINGER, self.close)

    def respond(
        self, status: int, reason: str, headers: HeaderLines, body: bytes, *, last: bool = False
    ) -> None:
        """Answer the request at hand; see FastPathClient."""
        assert self._head is not None
        last = last or not self._head.keep_alive or self._owner.draining
        self.transport.write(encode_response(status, reason, headers, body, last))
        self._note_answer(status, len(body))
        if last:
            self.close()
        else:
            self._next()

    def continue_in_task(self, rest: Continuation, over: Callable[[], None]) -> None:
        """Have a task answer the request at hand; see FastPathClient."""
        assert self._head is not None
        assert isinstance(self._call, FastPathCall)
        straight = self._call
        body = self._body = BodyStream(self.read_flow, self.buffers)
        body.end()
        self._begin_task(self._head, body, rest).add_done_callback(lambda _: over())
        # Not sooner: for the listener there is always one of the two under way.
        self._owner.over(straight)

    def close_if_idle(self) -> None:
        """Close the connection if it has been without a request for too long.

        What is left of an answer is dropped if the client has read nothing of it for too long.
        """
        if self._call is not None:
            return
        if self._is_left_unread():
            self._reset_now()
        if self._closing:
            return
        quiet = self.loop.time() - self._quiet_since
        patience = self._owner.patience
        if not self._reader.begun:
            if quiet >= patience.keep_alive:
                self.close()
        elif quiet >= patience.request_header_timeout:
            what = f"the request's head did not come within {patience.request_header_timeout:g} s"
            self._refuse(408, f"{what} (limits.request_header_timeout)")

    def _is_left_unread(self) -> bool:
        """Tell whether a client has read nothing of an answer for too long.

        To close a connection takes until all is sent, and so it may take for ever.
        """
        now, left = self.loop.time(), self.unsent
        if not left or left != self._left:
            self._left, self._left_since = left, now
        return now - self._left_since >= self._owner.patience.idle_timeout

    def close_for_drain(self, grace: float) -> None:
        """Close the connection if nothing has happened on it for so many seconds; see drain."""
        if self._call is not None or self.loop.time() - self._quiet_since < grace:
            return
        if not self._closing:
            self._closing = True
            self.transport.close()
        elif not self.unsent:
            self.transport.abort()  # the client has its answer, and does not close its side

    def close(self) -> None:
        """Close the connection once all is sent; gently, where the client may still be sending."""
        if self._closing or self.closed:
            return
        self._closing = True
        self._quiet_since = self.loop.time()
        draining = self._owner.draining  # which a client may not have known
        unread = bool(self._read_ahead) or (self._body and not self._body.ended)
        sending = draining or self._broken or unread
        if not sending or not self.transport.can_write_eof():
            self.transport.close()
            return
        # With bytes unread, a plain close would be a reset, and the answer might be lost.
        try:
            self.transport.write_eof()
        except OSError:
            self.transport.abort()  # the client is gone
            return
        self.discard_read_ahead()
        if self._body is not None:
            self._body.discard()
        if not draining:
            self._linger = self.loop.call_later(_LINGER, self.transport.abort)

    def _take_head(self, data: bytes | memoryview) -> None:
        try:
            found = self._reader.feed(data)
            if found is None:
                self._wait_for_head()
                return
            head = parse_request_head(found[0])
        except MalformedError as error:
            self._refuse(400, f"malformed HTTP request: {error}")
            return
        size = len(found[0])
        is_small = size <= MAX_CACHED_HEAD
        if self._head_size or not is_small:
            self._count_head(0 if is_small else HEAD_COPIES * size)
        self._head = head
        self._began = time.perf_counter()
        self._begin(head, found[1], is_small)

    def _wait_for_head(self) -> None:
        """Note a part of a head; empty lines before one are none, and give a client no time."""
        if self._reader.begun and not self._head_size:
            self._quiet_since = self.loop.time()
        self._count_head(self._reader.size)
        if self.buffers.free < 0:
            self._refuse(503, "the gateway holds too much already (limits.max_buffered_bytes)")

    def _begin(self, head: RequestHead, data: bytes | memoryview, is_small: bool) -> None:
        version = "1.0" if head.http_1_0 else "1.1"
        if self._introduction.forwarding is not self._owner.forwarding:
            self._introduction = ForwardedHeaders(self._owner.forwarding, self._peer)
        self.added_headers, self.request_id = self._introduction.make(head.headers, version)
        at_hand = len(data) == head.length and is_small and not head.http_1_0
        if at_hand and not self.write_blocked:
            self._call = self._owner.start_fast_path(self, head, data)
            if self._call is not None:
                return
        body = self._body = BodyStream(self.read_flow, self.buffers)
        self._decoder = ChunkedDecoder() if head.length is None else LengthDecoder(head.length)
        self._begin_task(head, body)
        self._take_body(body, data)

    def _begin_task(
        self, head: RequestHead, body: BodyStream, rest: Continuation | None = None
    ) -> asyncio.Task[None]:
        request = HttpRequest(head, body, self, self.added_headers)
        answer = HttpResponse(head, self, lambda: self._is_last(head, body), self.request_id)
        task = self._call = self._owner.begin(self, request, answer, rest)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Let go of a task that was cancelled before it began: it could not call ``answered``."""
        if self._call is task:
            self._note_answer(0, 0)

    def _note_answer(self, status: int, size: int) -> None:
        assert self._head is not None
        # The event loop's own clock counts whole milliseconds.
        seconds = time.perf_counter() - self._began
        self._owner.log(self._head, status, size, seconds, self.request_id)
        exchange, self._call = self._call, None
        if self._head_size:
            # A connection may wait long for its next request.
            self._head, self.added_headers = None, ()
            self._count_head(0)
        self._left = 0
        if isinstance(exchange, FastPathCall):
            self._owner.over(exchange)

    def _is_last(self, head: RequestHead, body: BodyStream) -> bool:
        """Tell whether nothing can follow the answer that begins now."""
        if not head.keep_alive or self._broken or self._owner.draining:
            return True
        # What comes next may be the body or, where the client waited to be told, a request.
        return not body.ended and expects_continue(head)

    def _take_body(self, body: BodyStream, data: bytes | memoryview) -> None:
        decoder = self._decoder
        try:
            piece = decoder.feed(data)
        except MalformedError as error:
            self._broken = True
            body.fail(bad_request(f"the request's body is broken: {error}"))
            return
        if piece:
            body.feed(piece, last=decoder.ended)
        rest, decoder.rest = decoder.rest, b""
        if decoder.ended:
            body.end()
            self.buffer_read_ahead(rest)
            if self._call is None:
                self._next()
        elif rest:
            self.defer_read_ahead(rest)

    def _next(self) -> None:
        """Wait for the next request, which may have come already."""
        self._body = None
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._quiet_since = self.loop.time()
        if self._read_ahead:
            self.process_read_ahead()

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no request, and close."""
        self.transport.write(encode_error(status, message))
        self._broken = True
        self._reader.forget()
        self._count_head(0)
        self.close()
