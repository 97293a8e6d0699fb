"""An endpoint that speaks HTTP/2: it sends each request on a stream of its connections."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Sequence
from typing import Final, cast

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.http1.deferrals import Arrivals
from gateway.http1.head import MAX_CACHED_HEAD, HeadParser, MalformedError, ResponseHead
from gateway.http2.hpack import NOT_INDEXED, Header, HeaderList
from gateway.http2.session import STREAM_WINDOW
from gateway.protocol.grpc.framing import PREFIX_SIZE, first_message_size
from gateway.sizes import CACHED_HEADS, CACHED_LINES
from gateway.system.bounded_cache import BoundedCache
from gateway.system.sockets.body_stream import BodyStream
from gateway.system.sockets.connection import Connection
from gateway.upstream.address import ServerAddress
from gateway.upstream.exchange import (
    WRITE_CHUNK,
    EndpointOptions,
    Exchange,
    PlainHead,
    ServerEndpoint,
    decode_fields,
    is_repeatable,
    send_body,
)
from gateway.upstream.http2.connection import Http2ServerConnection, ServerStream, SilenceLimits
from gateway.upstream.http2.connections import MAX_CONNECTIONS, DrainedStreams, ServerConnections
from gateway.upstream.transport import (
    HOP_BY_HOP,
    KEYED_RESPONSE_HEADERS,
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
    SentBody,
    UpstreamRequest,
    UpstreamResponse,
)

_MAX_SENDS: Final = 3
"""How often a request is sent that the server refuses without having processed it."""

_MAX_COMPLETE: Final = 32 * 1024
"""Bytes of a body that are waited for, if it does not begin as one of gRPC: less than a stream's
first window."""

_HEAD_PARSER: Final = HeadParser(KEYED_RESPONSE_HEADERS, noted=("content-length",))
_HOP_BY_HOP: Final = frozenset(name.encode() for name in HOP_BY_HOP)
_NO_FIELD: Final[object] = (b"", b"")
_MAX_CACHED_LINE: Final = 256
_fields_of_lines: Final[BoundedCache[bytes, object]] = BoundedCache(CACHED_LINES)
_heads: BoundedCache[tuple[Header, ...], ResponseHead] = BoundedCache(CACHED_HEADS)


class Http2Endpoint(ServerEndpoint):
    """An endpoint over HTTP/2; see ServerEndpoint.

    ``drained`` takes over the streams of calls that are given up; without it they are reset.
    """

    def __init__(
        self,
        address: ServerAddress,
        options: EndpointOptions,
        max_connections: int = MAX_CONNECTIONS,
        silence: SilenceLimits | None = None,
        drained: DrainedStreams | None = None,
    ) -> None:
        super().__init__(address, options)
        self._scheme = b"http" if address.tls is None else b"https"
        self._silence = silence
        self._encoded: BoundedCache[RequestTemplate, tuple[Header, ...]] = BoundedCache(
            CACHED_HEADS
        )
        self.connections = ServerConnections(self._connect, options.idle_timeout, max_connections)
        self.responds_large = False
        """Whether the last response was larger than a stream's first window, as its start told."""
        self._drained = drained
        self.drain_counters = None if drained is None else drained.counters

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; see UpstreamEndpoint."""
        return await Http2Exchange(self, None).run(request)

    async def close(self) -> None:
        """Close the idle connections, and cancel drained calls; calls in flight close theirs."""
        if self._drained is not None:
            self._drained.close()
        await self.connections.close()
        await self._wait_for_tasks()

    def after_timeout(self) -> None:
        """Use the connection of a call that has timed out no more; see UpstreamEndpoint."""
        self.connections.after_timeout()

    def try_reserve_stream(self) -> ReservedConnection | None:
        """Take a stream of a connection that has one free; see UpstreamEndpoint."""
        session = self.connections.take()
        return None if session is None else Http2Exchange(self, session)

    def request_fields(self, request: UpstreamRequest) -> tuple[Header, ...]:
        """Return the header list of a request."""
        return self._fields(request.method, request.target, request.headers.items())

    def template_fields(self, template: RequestTemplate, lines: bytes) -> tuple[Header, ...]:
        """Return the header list of a template, with the lines of further headers."""
        first = self._encoded.get(template)
        if first is None:
            first = self._fields(template.method, template.target, template.headers)
            self._encoded.put(template, first, template.content)
        known = _fields_of_lines.recent
        fields: list[object] = [*first]
        for line in lines.split(b"\r\n"):
            field = known.get(line) or _encode_line(line)
            if field is not _NO_FIELD:
                fields.append(field)
        return cast("tuple[Header, ...]", tuple(fields))

    def _fields(
        self, method: str, target: str, headers: Iterable[tuple[str, str]]
    ) -> tuple[Header, ...]:
        authority = self._address.authority
        fields: list[Header] = []
        for name, value in headers:
            field = cast("Header", _encode_line(f"{name}:{value}".encode("latin-1")))
            if field[0] == b"host":
                authority = value
            elif field[0]:
                fields.append(field)
        return (
            (b":method", method.encode("latin-1")),
            (b":scheme", self._scheme),
            (b":path", target.encode("latin-1")),
            (b":authority", authority.encode("latin-1")),
            *fields,
        )

    async def _connect(self) -> Http2ServerConnection:
        session = Http2ServerConnection(
            self.name, self.connections, self._options.buffers, self._silence, self._drained
        )
        try:
            await self._establish(session)
        except BaseException:
            session.drop()
            raise
        return session

    def _connect_error(self, connection: Connection, error: Exception) -> GatewayError:
        assert isinstance(connection, Http2ServerConnection)
        if isinstance(error, TimeoutError) and connection.max_streams <= 0:
            assert connection.refusal is not None
            return connection.refusal
        return super()._connect_error(connection, error)

    async def _until_ready(self, connection: Connection) -> None:
        assert isinstance(connection, Http2ServerConnection)
        await connection.ready


class Http2Exchange(Exchange):
    """An exchange on a stream of a connection that had one free, or on one that it waits for.

    It is the StreamReceiver of its response. If the server refuses the request unseen, it is sent
    again, perhaps over another connection.
    """

    def __init__(self, endpoint: Http2Endpoint, session: Http2ServerConnection | None) -> None:
        super().__init__(endpoint.deferrals)
        self._endpoint = endpoint
        self._session = session
        self._stream: ServerStream | None = None
        self._fields: tuple[Header, ...] = ()
        self._buffered: Sequence[bytes | memoryview] = ()
        self._streamed: AsyncIterable[bytes | memoryview] | None = None
        self._is_held = True
        """Whether a response is held back until it is complete."""
        self._received = 0
        """Bytes of it."""
        self._arrivals: Arrivals | None = None
        self._max_held = _MAX_COMPLETE
        self._sends = 0

    def send(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        receiver: ResponseReceiver,
    ) -> None:
        """Send the request; see ReservedConnection."""
        assert self._session is not None
        self.receiver = receiver
        self._fields = self._endpoint.template_fields(template, lines)
        self._buffered = body
        self._send(self._session)

    async def _begin(self, request: UpstreamRequest) -> None:
        connections, body = self._endpoint.connections, request.body
        self._is_held = False
        self._fields = self._endpoint.request_fields(request)
        if isinstance(body, AsyncIterable):
            self._streamed = body
        elif body is not None:
            self._buffered = body
        if (session := connections.take()) is not None:
            self._send(session)
        else:
            connections.wait(self)

    def send_over(self, session: Http2ServerConnection) -> None:
        """Send the request; see WaitingRequest."""
        try:
            self._send(session)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Release the stream, or reset it if the call is not complete."""
        self.receiver = None
        if self._session is not None and not self._sends:
            self._session.run_guarded(self._session.after_stream)  # it may be idle again
            return
        self._endpoint.connections.stop_waiting(self)
        self._release()

    def on_headers(self, headers: HeaderList) -> None:
        """Hold the headers back until the response is complete; see StreamReceiver."""
        head = _parse(headers) if self._is_held else None
        if head is None:
            self.hand_over(_plain(headers))
        else:
            assert self._stream is not None
            self.hold(head, is_complete=self._stream.received_end)

    def on_data(self, size: int) -> None:
        """Hold back no large response; see StreamReceiver."""
        if self.held is None or self._stream is None:
            return
        if not self._received:
            self._expect(self._stream)
        self._received += size
        if self._received > self._max_held:
            super().on_timeout()

    def on_timeout(self) -> None:
        """Wait no longer for the rest of a response, unless it keeps coming; see Http2Call."""
        if self._arrivals is None:
            self._arrivals = Arrivals(self._held_at)
        if self._arrivals.renew(self._received):
            self.deferrals.add(self, self._max_held)
        else:
            super().on_timeout()

    def _expect(self, stream: ServerStream) -> None:
        """Wait for a body that fits into a window: gRPC tells the size that it begins with."""
        size = first_message_size(stream.start(PREFIX_SIZE))
        self._endpoint.responds_large = size > STREAM_WINDOW
        if size > _MAX_COMPLETE:
            is_held = size <= stream.session.buffers.account.window and self._passes_untouched
            self._max_held = size if is_held else 0
            if is_held:
                stream.open_window()
                self.deferrals.shorten(self, size)

    def on_end(self) -> None:
        """Give the receiver the complete response; see StreamReceiver."""
        head, stream = self.take_held(), self._stream
        if head is not None and stream is not None:  # else it was handed over before
            self.complete(head, stream.peek(), stream.trailers)

    @property
    def _passes_untouched(self) -> bool:
        """Whether the body is not converted: a large one is converted as it arrives."""
        receiver, head = self.receiver, self.held
        return receiver is not None and head is not None and receiver.passes_untouched(head)

    def _send(self, session: Http2ServerConnection) -> None:
        self._sends += 1
        stream = self._stream = session.open_stream(self)
        body: SentBody | None = self._streamed
        if body is None:
            body = self._buffered
            size = sum(map(len, body))
            stream.send_headers(self._fields, end_stream=not size)
            if self._endpoint.responds_large:
                stream.open_window()  # else the server waits for it
            if not size or (size <= WRITE_CHUNK and stream.try_send(body, size)):
                return
        else:
            stream.send_headers(self._fields)
        self._sender = self._endpoint.start_task(send_body(stream, body, (stream.send_now,)))

    def _may_resend(self, error: Exception) -> bool:
        is_refused = isinstance(error, GatewayError) and error.kind is ErrorKind.REFUSED
        return is_refused and self._sends < _MAX_SENDS and is_repeatable(self._streamed)

    def _resend(self) -> None:
        self._release()
        self._endpoint.connections.wait(self)

    def _release(self) -> None:
        self.take_held()
        self._stop_sender()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _body(self) -> BodyStream:
        assert self._stream is not None
        return self._stream


def _plain(headers: HeaderList) -> PlainHead:
    """Return the headers as they came."""
    (_, status), *fields = headers.fields
    return PlainHead(int(status), CIMultiDictProxy(CIMultiDict(decode_fields(fields))))


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


def _encode_line(line: bytes) -> object:
    """Encode a header line, without its end.

    Empty if it has no meaning in HTTP/2: RFC 9113, section 8.2.2.
    """
    name, _, value = line.partition(b":")
    lower, value = name.lower(), value.strip(b" \t")
    if lower in NOT_INDEXED:  # each has another value
        return lower, value
    if (known := _fields_of_lines.get(line)) is not None:
        return known
    is_te = lower == b"te" and value.lower() == b"trailers"
    field = _NO_FIELD if not lower or (lower in _HOP_BY_HOP and not is_te) else (lower, value)
    if len(line) <= _MAX_CACHED_LINE:
        _fields_of_lines.put(line, field)
    return field
