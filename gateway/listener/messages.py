"""A client's request over any version of HTTP, and the response to it over each."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, cast

from multidict import CIMultiDict

from gateway.errors import GatewayError, bad_request
from gateway.http1.connection import Http1Connection
from gateway.http1.head import (
    ABSOLUTE_FORM,
    MAX_CACHED_HEAD,
    STATUSES_WITHOUT_BODY,
    RequestHead,
    encode_head,
    encode_head_lines,
    parse_lines,
)
from gateway.http2.errors import ErrorCode
from gateway.http2.header_check import CONNECTION_SPECIFIC
from gateway.http2.hpack import Header, HeaderList
from gateway.http2.session import StreamHandler
from gateway.observe.call_record import CallRecord
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.filters.forwarded_headers import REQUEST_ID
from gateway.proxy.headers import SERVER_TIMING, server_timing
from gateway.proxy.interfaces import (
    ClientRequest,
    ClientResponse,
    FastPathClient,
    HeaderLines,
    ResponseTemplate,
)
from gateway.system.sockets.body_stream import BodyStream, RelaySteps

_SERVER_NAME: Final = "tensorgate"
_REQUEST_ID_LINE: Final = f"{REQUEST_ID}: ".encode()
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ListenerRequest(ClientRequest):
    """A request, over any version of HTTP; ``send_continue`` tells its client to send the body."""

    def __init__(
        self,
        head: RequestHead,
        body: BodyStream,
        client: FastPathClient,
        send_continue: Callable[[], None],
    ) -> None:
        self.head = head
        self.method = head.method
        self.target = head.target
        self.headers = head.headers
        self.content_length = head.length
        self.added_headers = client.added_headers
        self.carries_trailers = client.carries_trailers
        self.placed = client.placed
        self.infer_request = client.infer_request
        self._body = body
        self._send_continue = send_continue
        # RFC 9110, section 10.1.1: the client may wait for 100 before it sends its body.
        self._continue_pending = expects_continue(head) and not head.http_1_0

    async def read(self) -> bytes | memoryview:
        """Return the next piece of the body."""
        self._answer_expectation()
        return await self._body.read()

    def read_within(self, deadline: Deadline) -> Awaitable[bytes | memoryview]:
        """Read with the client expected; see ClientRequest."""
        self._answer_expectation()
        return deadline.receive(self._body)

    def relay(self, steps: RelaySteps) -> Coroutine[Any, Any, bytes | memoryview]:
        """Let each piece pass these steps; see ClientRequest."""
        self._answer_expectation()
        return self._body.relay(steps)

    def _answer_expectation(self) -> None:
        if self._continue_pending:
            self._continue_pending = False
            if not self._body.ended:
                self._send_continue()


def expects_continue(head: RequestHead) -> bool:
    """Whether the client waits for 100 Continue before it sends its body."""
    return head.headers.get("Expect", "").lower() == "100-continue"


def to_origin_form(target: str) -> str:
    """Return the path and query of a request target: RFC 9112, section 3.2.

    Raises GatewayError (400) for a target without a path.
    """
    if target.startswith("/") and "#" not in target:
        return target
    if absolute := ABSOLUTE_FORM.match(target):
        target = target[absolute.end() :]
        if not target.startswith("/"):
            target = "/" + target
    if not target.startswith("/") or "#" in target:
        raise bad_request(f"the request target must be a path, got {target[:80]!r}")
    return target


class ListenerResponse(ClientResponse):
    """The response to a request, over any version of HTTP."""

    def __init__(self, head: RequestHead, record: CallRecord) -> None:
        self.record = record
        self.last = False
        """Whether the connection closes after it; HTTP/2 goes on with other streams."""
        self.finished = False
        self._request = head
        self._has_no_body = False

    def _forget_start(self) -> None:
        """Undo ``_start``; what the head said of the connection holds on."""
        self.started = False
        self.record.status = self.record.response_bytes = 0

    def _start(self, status: int, headers: CIMultiDict[str]) -> list[tuple[str, str]]:
        """Record the start of the response; return its headers, completed."""
        self.record.status = status
        self.started = True
        if self.header_policy is not None:
            self.header_policy.apply(headers)
            timing = server_timing(self.record) if self.header_policy.adds_server_timing else ""
            if timing:
                headers.add(SERVER_TIMING, timing)
        if self.record.request_id:
            headers[REQUEST_ID] = self.record.request_id
        self._has_no_body = self._request.method == "HEAD" or status in STATUSES_WITHOUT_BODY
        lines = list(headers.items())
        add_gateway_headers(lines, {name.lower() for name in headers}, int(time.time()))
        return lines


class HttpResponse(ListenerResponse):
    """The response to a request, which is written to the connection.

    When it starts, ``closes_after`` says whether the connection must close after it.
    """

    def __init__(
        self,
        head: RequestHead,
        connection: Http1Connection,
        closes_after: Callable[[RequestHead], bool],
        record: CallRecord,
    ) -> None:
        super().__init__(head, record)
        self._connection = connection
        self._closes_after = closes_after
        self._chunked = False
        self._head = b""
        # TlsTransport encrypts later what the client does not read yet.
        self.can_wait_until_sent = connection.transport.get_extra_info("ssl_object") is None

    async def wait_until_sent(self) -> None:
        """Wait until the kernel has all that was written."""
        await self._connection.wait_until_sent()

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Write the head, together with the start of the body if that follows at once."""
        request = self._request
        lines = self._start(status, headers)
        self.last = self.last or self._closes_after(request)
        if "Content-Length" not in headers and not self._has_no_body:
            self._chunked = not request.http_1_0
            self.last |= request.http_1_0  # only the close marks the end of the body
        if self._chunked:
            lines.append(("Transfer-Encoding", "chunked"))
        if self.last:
            lines.append(("Connection", "close"))
        elif request.http_1_0:
            lines.append(("Connection", "keep-alive"))
        self._head = encode_head(_status_line(status, reason), lines)
        self._connection.buffer_write(self._head)

    async def write(self, data: bytes | memoryview) -> None:
        """Write a piece of the body."""
        if self._has_no_body or not data:
            return
        self.record.response_bytes += len(data)
        self._connection.write_body(data, self._chunked)
        if self._connection.write_blocked:
            await self._connection.drain()

    async def finish(self, trailers: HeaderLines = ()) -> None:
        """End the response, without the trailers: few clients of HTTP/1.1 read them."""
        self._connection.end_body(self._chunked)
        self.finished = True

    def abort(self) -> None:
        """Reset the connection."""
        self._connection.reset()

    def take_back(self) -> bool:
        """Forget the response if all of it is still buffered."""
        if not self._connection.take_back_write(self._head):
            return False
        self._chunked = False
        self._forget_start()
        return True


def error_template(error: GatewayError) -> ResponseTemplate:
    """Return status and headers for the error of a request without a valid head."""
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    if error.retry_after is not None:
        headers += (("Retry-After", str(error.retry_after)),)
    return ResponseTemplate(error.kind.value.status, "", headers)


def encode_response(
    template: ResponseTemplate, lines: bytes, body: bytes | memoryview, last: bool
) -> Sequence[bytes | memoryview]:
    """Return the parts of a fully buffered response; after the ``last`` one the connection closes.

    ``lines`` are headers beside those of the template.
    """
    start = template.encoded.get(last)
    if start is None:
        start = template.encoded[last] = _encode_template(template, last)
    date = b"" if template.has_date else _date_line(int(time.time()))
    if template.status in STATUSES_WITHOUT_BODY:
        return start, date, lines, b"\r\n"
    return start, date, lines, b"Content-Length: %d\r\n\r\n" % len(body), body


def with_request_id(lines: bytes, request_id: str) -> bytes:
    """Return header lines of a response with the call's id, which replaces that of the server."""
    if lines.lower().partition(b"x-request-id:")[1]:  # compiled, a third of the time of find
        each = lines.splitlines(keepends=True)
        lines = b"".join([line for line in each if not line.lower().startswith(b"x-request-id:")])
    return b"".join((lines, _REQUEST_ID_LINE, request_id.encode(), b"\r\n"))


def _encode_template(template: ResponseTemplate, last: bool) -> bytes:
    lines = list(template.headers)
    if last:
        lines.append(("Connection", "close"))
    if not template.has_server:
        lines.append(("Server", _SERVER_NAME))
    return encode_head_lines(_status_line(template.status, template.reason), lines)


@lru_cache(maxsize=1)
def _date_line(second: int) -> bytes:
    return f"Date: {http_date(second)}\r\n".encode()


def add_gateway_headers(lines: list[tuple[str, str]], names: set[str], second: int) -> None:
    """Add Server and Date, unless the server has set them."""
    if "server" not in names:
        lines.append(("Server", _SERVER_NAME))
    if "date" not in names:
        lines.append(("Date", http_date(second)))


def _status_line(status: int, reason: str) -> str:
    return f"HTTP/1.1 {status} {reason or _PHRASES.get(status, '')}"


@lru_cache(maxsize=1)
def http_date(second: int) -> str:
    """Format the Date header: RFC 9110, section 6.6.1."""
    return formatdate(second, usegmt=True)


# ---------------------------------------------------------------------------------- HTTP/2

CONTINUE_FIELDS: Final[tuple[Header, ...]] = ((b":status", b"100"),)

_ONCE: Final = frozenset((b"host", b"content-length"))


def split_request_head(
    headers: HeaderList, body_size: int, noted_names: frozenset[bytes]
) -> tuple[tuple[object, ...], list[str | bytes] | None]:
    """Return a checked header list without the values of noted headers, and these.

    Lists with equal first parts have equal heads of HTTP/1.1, but for these values. They are those
    that ``RequestHead.with_noted`` takes, None if they are large. ``body_size`` is as below.
    """
    same: list[object] = []
    values: list[str | bytes] = []
    length = b"%d" % body_size if body_size > 0 else b""
    size = 0
    for field in cast("tuple[object, ...]", headers.fields):
        name, value = cast("Header", field)
        if name not in noted_names:
            same.append(field)
        elif name == b"content-length":
            length = value.strip(b" \t")
        else:
            same.append(name)
            size += len(value)
            values += value.decode("latin-1").strip(" \t"), name + b": " + value + b"\r\n"
    if not length:
        same.append(body_size)
    elif b"content-length" not in noted_names:
        same.append(length)
    else:
        same.append(b"content-length")
        values += length.decode(), b"Content-Length: " + length + b"\r\n"
    return tuple(same), values if size <= MAX_CACHED_HEAD else None


def encode_request_head(headers: HeaderList, body_size: int) -> bytes:
    """Write a checked header list as the equivalent head of HTTP/1.1.

    ``body_size`` is that of a complete body, -1 before it is complete.
    """
    # Each pseudo-header comes once; host is that of :authority (section 8.3.1), and all lengths
    # are equal.
    once: dict[bytes, bytes] = {}
    cookies: list[bytes] = []
    lines: list[bytes] = []
    for name, value in headers.fields:
        if name.startswith(b":") or name in _ONCE:
            once[name] = value
        elif name == b"cookie":
            cookies.append(value)
        else:
            lines.append(name + b": " + value)
    host = once.get(b":authority", once.get(b"host"))
    if host is not None:
        lines.insert(0, b"Host: " + host)
    if cookies:
        lines.append(b"Cookie: " + b"; ".join(cookies))  # section 8.2.3
    if b"content-length" in once:
        lines.append(b"Content-Length: " + once[b"content-length"])
    elif body_size > 0:
        lines.append(b"Content-Length: %d" % body_size)
    elif body_size < 0:
        lines.append(b"Transfer-Encoding: chunked")
    target = once.get(b":path") or host or b"*"  # CONNECT has no path
    first = b" ".join((once[b":method"], target, b"HTTP/1.1"))
    return b"\r\n".join((first, *lines, b"", b""))


class Http2Response(ListenerResponse):
    """The response to a request, which is sent on its stream.

    Its headers are sent with the start of the body, or in the next iteration of the event loop.
    """

    def __init__(self, head: RequestHead, stream: StreamHandler, record: CallRecord) -> None:
        super().__init__(head, record)
        self._stream = stream
        self._pending: tuple[Header, ...] = ()
        self._left = -1

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Start the response."""
        lines = self._start(status, headers)
        self._pending = (_status_field(status), *encode_fields(lines))
        length = headers.get("Content-Length", "")
        self._left = int(length) if length.isdecimal() else -1
        self._stream.session.loop.call_soon(self._send_pending)

    async def write(self, data: bytes | memoryview) -> None:
        """Send a piece of the body; waits while the client does not read."""
        size = len(data)
        if self._has_no_body or not size:
            return
        self.record.response_bytes += size
        self._send_pending()
        is_last = size == self._left
        self._left -= size
        await self._stream.send(data, end_stream=is_last)

    def relay_steps(self) -> RelaySteps:
        """Return the step that sends a part of a body of unknown size; see ClientResponse."""
        return () if self._has_no_body or self._left >= 0 else (self._write_now,)

    def _write_now(self, data: bytes | memoryview) -> bool:
        if self._pending or not self._stream.send_now(data):
            return False
        self.record.response_bytes += len(data)
        return True

    async def finish(self, trailers: HeaderLines = ()) -> None:
        """End the response, with these trailers."""
        if trailers:
            self._send_pending()
            self._stream.send_headers(tuple(encode_fields(trailers)), end_stream=True)
        elif self._pending:
            self._send_pending(end_stream=True)
        elif not self._stream.stream.sent_end:
            await self._stream.send(b"", end_stream=True)
        self.finished = True

    def abort(self) -> None:
        """Reset the stream."""
        self._pending = ()
        self._stream.reset(ErrorCode.INTERNAL_ERROR)

    def take_back(self) -> bool:
        """Forget the response if its headers are still to be sent."""
        if not self._pending:
            return False
        self._pending = ()
        self._forget_start()
        return True

    def _send_pending(self, end_stream: bool = False) -> None:
        if self._pending:
            fields, self._pending = self._pending, ()
            self._stream.send_headers(fields, end_stream)


def encode_fields(lines: Iterable[tuple[str, str]]) -> list[Header]:
    """Encode headers for HTTP/2, without those of a connection."""
    fields: list[Header] = []
    for name, value in lines:
        lower = _field_name(name)
        if lower:
            fields.append((lower, value.strip(" \t").encode("latin-1")))
    return fields


def response_fields(template: ResponseTemplate, lines: bytes, size: int) -> tuple[Header, ...]:
    """Return the headers of a fully buffered response with a body of ``size`` bytes.

    ``lines`` are headers beside those of the template.
    """
    fields = template.fields
    if not fields:
        headers = list(template.headers)
        names = {name.lower() for name, _ in headers} | {"date"}
        add_gateway_headers(headers, names, 0)
        fields = (_status_field(template.status), *encode_fields(headers))
        template.fields = fields
    more = encode_fields(parse_lines(lines))
    if not template.has_date:
        more.append((b"date", http_date(int(time.time())).encode()))
    if template.states_length and template.status not in STATUSES_WITHOUT_BODY:
        more.append((b"content-length", b"%d" % size))
    return (*fields, *more)


@lru_cache
def _status_field(status: int) -> Header:
    return b":status", b"%d" % status


@lru_cache
def _field_name(name: str) -> bytes:
    """Return a name in lower case; empty for one that HTTP/2 does not have."""
    lower = name.lower().encode("latin-1")
    return b"" if lower in CONNECTION_SPECIFIC else lower
