"""A stream that was taken for one buffered request, whose response is handed over complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Protocol

from gateway.errors import ErrorKind, GatewayError
from gateway.http1.head import MAX_CACHED_HEAD, HeadParser, MalformedError, ResponseHead
from gateway.http2.header_table import Header
from gateway.http2.hpack import HeaderList
from gateway.sizes import CACHED_HEADS
from gateway.system.bounded_cache import BoundedCache
from gateway.system.timeout_queue import TimeoutQueue
from gateway.upstream.http2.connection import Http2ServerConnection, ServerStream
from gateway.upstream.http2.connections import ServerConnections
from gateway.upstream.http2.response import Http2Response
from gateway.upstream.transport import (
    KEYED_RESPONSE_HEADERS,
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
    SentBody,
)

MAX_SENDS: Final = 3
"""How often a request is sent that the server refuses without having processed it."""

_MAX_COMPLETE: Final = 32 * 1024
"""Bytes of a body that are waited for: less than a stream's first window."""

_HEAD_PARSER: Final = HeadParser(KEYED_RESPONSE_HEADERS, noted=("content-length",))
_heads: BoundedCache[tuple[Header, ...], ResponseHead] = BoundedCache(CACHED_HEADS)


class StreamEndpoint(Protocol):
    """The endpoint of a stream."""

    connections: ServerConnections
    deferrals: TimeoutQueue
    """Ends the waits for the rest of small responses."""

    def template_fields(self, template: RequestTemplate, lines: bytes) -> tuple[Header, ...]:
        """Return the header list of a template, with the lines of further headers."""

    def start_sender(self, stream: ServerStream, body: SentBody) -> asyncio.Task[None]:
        """Start a task that sends a body."""


class ReservedStream(ReservedConnection):
    """A stream of a connection that had one free.

    It is the StreamReceiver of its response. If the server refuses the request unseen, it is sent
    again, perhaps over another connection.
    """

    def __init__(self, session: Http2ServerConnection, endpoint: StreamEndpoint) -> None:
        self._session = session
        self._endpoint = endpoint
        self._fields: tuple[Header, ...] = ()
        self._body: Sequence[bytes | memoryview] = ()
        self._receiver: ResponseReceiver | None = None
        self._stream: ServerStream | None = None
        self._sender: asyncio.Task[None] | None = None
        self._headers: HeaderList | None = None
        """The headers of a response that is held back until its body is complete."""
        self._head_at = 0.0
        self._head_delay = 0.0
        self._sends = 0

    @property
    def head_delay(self) -> float:
        """Return the seconds for which the head was held back; see ReservedConnection."""
        return self._head_delay

    def send(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        receiver: ResponseReceiver,
    ) -> None:
        """Send the request; see ReservedConnection."""
        self._receiver = receiver
        self._fields = self._endpoint.template_fields(template, lines)
        self._body = body
        self._send(self._session)

    def send_over(self, session: Http2ServerConnection) -> None:
        """Send the request again; see WaitingRequest."""
        try:
            self._send(session)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Release the stream, or reset it if the call is not complete."""
        self._receiver = None
        if not self._sends:
            self._session.run_guarded(self._session.after_stream)  # it may be idle again
            return
        self._endpoint.connections.stop_waiting(self)
        self._release()

    def on_headers(self, headers: HeaderList) -> None:
        """Hold the headers back until the response is complete; see StreamReceiver."""
        self._headers = headers
        self._head_at = time.perf_counter()
        assert self._stream is not None
        if not self._stream.received_end:
            self._endpoint.deferrals.add(self)

    def on_data(self, size: int) -> None:
        """Hold back no large response; see StreamReceiver."""
        stream = self._stream
        if self._headers is not None and stream and stream.buffered_size > _MAX_COMPLETE:
            self._hand_over()

    def on_timeout(self) -> None:
        """Hand over a response that is not complete soon."""
        self._hand_over()

    def on_end(self) -> None:
        """Give the receiver the complete response; see StreamReceiver."""
        headers, stream, receiver = self._headers, self._stream, self._receiver
        if headers is None or stream is None or receiver is None:
            return  # it was handed over before
        head = _parse(headers)
        if head is None:
            self._hand_over()
            return
        self._end_deferral()
        trailers = stream.trailers
        fields = () if trailers is None else trailers.fields
        if not receiver.on_complete(head, stream.peek(), fields):
            receiver.on_headers(Http2Response(headers, stream, self, self._head_delay))

    def on_error(self, error: Exception) -> None:
        """Send the request again if the server has not seen it; see StreamReceiver."""
        is_refused = isinstance(error, GatewayError) and error.kind is ErrorKind.REFUSED
        if is_refused and self._sends < MAX_SENDS:
            self._release()
            self._endpoint.connections.wait(self)
        else:
            self._fail(error)

    def _send(self, session: Http2ServerConnection) -> None:
        self._sends += 1
        stream = self._stream = session.open_stream(self)
        body = self._body
        size = sum(map(len, body))
        stream.send_headers(self._fields, end_stream=not size)
        if size and not stream.try_send(body, size):
            self._sender = self._endpoint.start_sender(stream, body)

    def _hand_over(self) -> None:
        """Let the receiver read the rest of the body itself."""
        headers, stream, receiver = self._headers, self._stream, self._receiver
        self._end_deferral()
        if headers is not None and stream is not None and receiver is not None:
            receiver.on_headers(Http2Response(headers, stream, self, self._head_delay))

    def _fail(self, error: Exception) -> None:
        is_handed_over = self._headers is None and self._head_at > 0
        self._end_deferral()
        if self._receiver is not None and not is_handed_over:
            self._receiver.on_error(error)

    def _end_deferral(self) -> None:
        self._headers = None
        self._head_delay = time.perf_counter() - self._head_at
        self._endpoint.deferrals.remove(self)

    def _release(self) -> None:
        self._endpoint.deferrals.remove(self)
        self._headers = None
        # A cancelled task keeps its exception, whose frames may refer back here.
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _parse(headers: HeaderList) -> ResponseHead | None:
    """Return the headers as a head of HTTP/1.1; None if they are large, or that has none such.

    Spaces around a value would be lost in it: Triton's texts may end with one.
    """
    fields = headers.fields
    head = _heads.get(fields)
    if head is not None:
        return head
    if any(value != value.strip(b" ") for _, value in fields):
        return None
    lines = [b"%s: %s\r\n" % field for field in fields[1:]]
    text = b"".join((b"HTTP/1.1 %s \r\n" % fields[0][1], *lines, b"\r\n"))
    if len(text) > MAX_CACHED_HEAD:
        return None
    try:
        return _heads.put(fields, _HEAD_PARSER.parse_response(text, "POST"))
    except MalformedError:
        return None
