"""A client's request and its answer, as an exchange sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from multidict import CIMultiDict

from gateway.errors import bad_request
from gateway.http1.connection import BodyStream, Connection
from gateway.http1.head import ABSOLUTE_FORM, RequestHead, encode_head, encode_head_lines
from gateway.proxy.dispatch import error_body
from gateway.proxy.interfaces import ClientRequest, ClientResponse, HeaderLines
from gateway.sizes import CACHED_HEADS

_SERVER = "tensorgate"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


class HttpRequest(ClientRequest):
    """A request on a connection."""

    def __init__(
        self,
        head: RequestHead,
        body: BodyStream,
        connection: Connection,
        added_headers: HeaderLines,
    ) -> None:
        self.method = head.method
        self.target = head.target
        self.headers = head.headers
        self.content_length = head.length
        self.added_headers = added_headers
        self._body = body
        self._connection = connection
        # RFC 9110, section 10.1.1: the client may wait for this before it sends its body.
        self._owes_continue = expects_continue(head) and not head.http_1_0

    async def read(self) -> bytes | memoryview:
        """Give the next piece of the body."""
        if self._owes_continue:
            self._owes_continue = False
            if not self._body.ended:
                self._connection.transport.write(_CONTINUE)
        return await self._body.read()


def expects_continue(head: RequestHead) -> bool:
    """Tell whether the client wants to be told to send its body."""
    return head.headers.get("Expect", "").lower() == "100-continue"


def origin_form(target: str) -> str:
    """Give a request target as path and query; RFC 9112, section 3.2.

    Raises GatewayError (400) for a form that asks for no resource.
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


class HttpResponse(ClientResponse):
    """The answer to a request on a connection.

    ``is_last`` is asked, when it starts, whether the connection ends with it; ``last`` tells.
    """

    def __init__(
        self,
        head: RequestHead,
        connection: Connection,
        is_last: Callable[[], bool],
        request_id: str,
    ) -> None:
        self.request_id = request_id
        self.status = 0
        self.size = 0
        self.last = False
        self.finished = False
        self._request = head
        self._connection = connection
        self._is_last = is_last
        self._chunked = False
        self._bodiless = False

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Make the head; it goes out with the first of the body, or when nothing else is done."""
        request = self._request
        self.status = status
        self.started = True
        self._bodiless = request.method == "HEAD" or status in _WITHOUT_BODY
        self.last = self.last or self._is_last()
        lines = list(headers.items())
        if "Content-Length" not in headers and not self._bodiless:
            self._chunked = not request.http_1_0
            self.last |= request.http_1_0  # nothing else tells where its body ends
        if self._chunked:
            lines.append(("Transfer-Encoding", "chunked"))
        if self.last:
            lines.append(("Connection", "close"))
        elif request.http_1_0:
            lines.append(("Connection", "keep-alive"))
        self._connection.buffer_write(_head(status, reason, headers, lines))

    async def write(self, data: bytes | memoryview) -> None:
        """Write a part of the body."""
        if self._bodiless or not data:
            return
        self.size += len(data)
        self._connection.write_body(data, self._chunked)
        if self._connection.write_blocked:
            await self._connection.drain()

    async def finish(self) -> None:
        """End the answer."""
        self._connection.end_body(self._chunked)
        self.finished = True

    def abort(self) -> None:
        """Reset the connection."""
        self._connection.reset()


def encode_error(status: int, message: str) -> bytes:
    """Write the whole answer to what is no request, the connection's last."""
    headers = (("Content-Type", "application/json"),)
    return encode_response(status, "", headers, error_body(message), last=True)


def encode_response(
    status: int, reason: str, headers: HeaderLines, body: bytes, last: bool
) -> bytes:
    """Write an answer at hand as a whole; ``last`` says that the connection ends with it."""
    start, sized = _start(status, reason, headers, last, int(time.time()))
    length = b"\r\n" if sized else b"Content-Length: %d\r\n\r\n" % len(body)
    return b"".join((start, length, body))


@lru_cache(maxsize=CACHED_HEADS)
def _start(
    status: int, reason: str, headers: HeaderLines, last: bool, second: int
) -> tuple[bytes, bool]:
    """Write the lines that answers have in common; tell if those give the body's length."""
    lines = list(headers)
    names = {name.lower() for name, _ in headers}
    if last:
        lines.append(("Connection", "close"))
    _add_own(lines, names, second)
    sized = "content-length" in names or status in _WITHOUT_BODY
    return encode_head_lines(_first_line(status, reason), lines), sized


def _head(
    status: int, reason: str, headers: CIMultiDict[str], lines: list[tuple[str, str]]
) -> bytes:
    _add_own(lines, {name.lower() for name in headers}, int(time.time()))
    return encode_head(_first_line(status, reason), lines)


def _add_own(lines: list[tuple[str, str]], names: set[str], second: int) -> None:
    """Add what an answer says of the gateway, where the server has said nothing."""
    if "server" not in names:
        lines.append(("Server", _SERVER))
    if "date" not in names:
        lines.append(("Date", _date(second)))


def _first_line(status: int, reason: str) -> str:
    return f"HTTP/1.1 {status} {reason or _phrase(status)}"


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    """Give the Date of RFC 9110, section 6.6.1."""
    return formatdate(second, usegmt=True)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
