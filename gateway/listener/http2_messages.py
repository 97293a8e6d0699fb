"""A client's request and the response to it, over a stream of an HTTP/2 connection."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from multidict import CIMultiDict

from gateway.http1.head import STATUSES_WITHOUT_BODY, RequestHead, parse_lines
from gateway.http2.errors import ErrorCode
from gateway.http2.hpack import Header, HeaderList
from gateway.http2.session import StreamHandler
from gateway.listener.messages import (
    ListenerResponse,
    add_gateway_headers,
    http_date,
)
from gateway.observe.call_record import CallRecord
from gateway.proxy.interfaces import HeaderLines, ResponseTemplate

CONTINUE: Final[tuple[Header, ...]] = ((b":status", b"100"),)

_ONCE: Final = frozenset((b"host", b"content-length"))

_CONNECTION_SPECIFIC: Final = frozenset(
    ("connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade")
)
"""RFC 9113, section 8.2.2."""


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
    lower = name.lower()
    return b"" if lower in _CONNECTION_SPECIFIC else lower.encode("latin-1")
