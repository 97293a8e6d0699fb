"""HTTP/1.1 from clients, on aiohttp's low-level server.

All that depends on aiohttp's server is in this file.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError
from aiohttp.web_protocol import RequestHandler, _ErrInfo
from multidict import CIMultiDict

from gateway.errors import GatewayError, bad_request
from gateway.exchange.base import ClientAnswer, ClientRequest
from gateway.exchange.dispatch import answer_error, error_body
from gateway.observe.access_log import AccessLog

READ_BUFFER = 256 * 1024
"""Bytes of a request's body that are read ahead of its reader, doubled at most."""

_SERVER = "tensorgate"
_MAX_HEADER = 64 * 1024
_BACKLOG = 1024
_NO_LINGERING = struct.pack("ii", 1, 0)
"""On, and 0 seconds: a connection that is closed is reset."""
_LAST_MOMENT = 0.05
"""Seconds for what is cancelled to end; to aiohttp 0 would mean any time."""

_ABSOLUTE_FORM = re.compile(r"https?://[^/?#]*", re.IGNORECASE)

_log = logging.getLogger("tensorgate.listener")

Exchange = Callable[[ClientRequest, ClientAnswer], Awaitable[None]]


class HttpListener:
    """Accepts connections and makes an exchange of each request.

    ``access_log`` may be None.
    """

    def __init__(self, exchange: Exchange, access_log: AccessLog | None) -> None:
        self._exchange = exchange
        self._access_log = access_log
        self._web = _Server(self._handle)
        self._servers: list[asyncio.Server] = []
        self._busy: dict[asyncio.Task[None], RequestHandler] = {}
        self._draining = False

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections on a bound socket; this owns it from now on."""
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
        self._servers.append(await create(self._web, sock=sock, backlog=_BACKLOG))

    async def drain(self, patience: float) -> int:
        """Stop accepting, let exchanges under way finish, drop those that take too long.

        ``patience`` is in seconds. Gives the number of exchanges dropped.
        """
        self._draining = True
        for server in self._servers:
            server.close()
        for connection in self._web.connections:
            if connection._waiter is not None and not connection._waiter.done():
                connection.force_close()  # it waits for a request
        late: set[asyncio.Task[None]] = set()
        if self._busy:
            _, late = await asyncio.wait(self._busy, timeout=patience)
        for connection in [self._busy[task] for task in late]:
            _reset(connection.transport)
        await self._web.shutdown(_LAST_MOMENT)
        return len(late)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._busy[task] = request.protocol
        answer = _HttpAnswer(request, lambda: self._draining)
        started = asyncio.get_running_loop().time()
        try:
            await self._run(request, answer)
        finally:
            del self._busy[task]
            if request.content.exception() is not None:
                # A broken body: aiohttp need not look for what is left of it.
                request.content.feed_eof()
            if self._access_log is not None:
                seconds = asyncio.get_running_loop().time() - started
                self._access_log.write(
                    request.method, request.raw_path, answer.status, answer.size, seconds
                )
        if self._draining:
            answer.response.force_close()
        return answer.response

    async def _run(self, request: web.BaseRequest, answer: _HttpAnswer) -> None:
        try:
            await self._exchange(_HttpRequest(request), answer)
        except GatewayError as error:
            await answer_error(answer, error)
        except ConnectionError:
            raise  # the client is gone
        except Exception:
            # A fault of our own: never a silent one, and never one that takes the process along.
            _log.exception("%s %s failed", request.method, request.raw_path)
            if answer.started:
                answer.abort()
            else:
                raise


class _Server(web.Server):
    """aiohttp's server, with connections that answer what is not HTTP in the protocol's form."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        # handler_cancellation: a client that leaves ends its exchange.
        super().__init__(handler, handler_cancellation=True)

    def __call__(self) -> RequestHandler:
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None is what turns it off
            auto_decompress=False,
            read_bufsize=READ_BUFFER,
            max_line_size=_MAX_HEADER,
            max_field_size=_MAX_HEADER,
        )


class _Connection(RequestHandler):
    def data_received(self, data: bytes) -> None:
        """Let whoever reads a body know, too, that what follows is not HTTP."""
        super().data_received(data)
        if not self._messages or not isinstance(self._messages[-1][0], _ErrInfo):
            return
        bodies = [body for _, body in self._messages]
        if self._current_request is not None:
            bodies.append(self._current_request.content)
        for body in bodies:
            if not body.is_eof():
                body.set_exception(
                    web.RequestPayloadError(_first_line(self._messages[-1][0].message))
                )

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        if isinstance(exc, BadHttpMethod):
            message = "this is not HTTP"
        elif isinstance(exc, HttpProcessingError):
            message = f"malformed HTTP request: {_first_line(exc.message)}"
        else:
            message = "the gateway failed; its log says why"
        response = web.Response(
            status=status,
            body=error_body(message),
            content_type="application/json",
            headers={"Server": _SERVER},
        )
        response.force_close()
        return response


def _first_line(message: str) -> str:
    # aiohttp's parser shows the place in further lines.
    return message.partition("\n")[0].rstrip(":")


class _HttpRequest(ClientRequest):
    def __init__(self, request: web.BaseRequest) -> None:
        if request.version not in (HttpVersion10, HttpVersion11):
            # aiohttp takes 0.9 and 2.0 as well, and answers as if it spoke them.
            raise bad_request("only HTTP/1.1 and HTTP/1.0 are spoken here")
        self.method = request.method
        self.target = _origin_form(request.raw_path)
        self.headers = request.headers
        self.content_length = request.content_length
        if self.content_length is None and not request.body_exists:
            self.content_length = 0
        self._request = request

    async def chunks(self) -> AsyncIterator[bytes]:
        # RFC 9110, section 10.1.1: the client may be waiting for this before it sends its body.
        if _expects_continue(self._request):
            self._send_continue()
        content = self._request.content
        try:
            # readchunk, unlike readany, does not join what has come in several pieces. What it
            # gives at the end is not the same for an empty body and any other.
            while not content.at_eof():
                piece, _ = await content.readchunk()
                if piece:
                    yield piece
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise bad_request(f"the request's body is broken: {error}") from error

    def _send_continue(self) -> None:
        transport = self._request.transport
        if transport is not None and self._request.version >= (1, 1):
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _expects_continue(request: web.BaseRequest) -> bool:
    return request.headers.get("Expect", "").lower() == "100-continue"


def _origin_form(target: str) -> str:
    """Give a request target as path and query; RFC 9112, section 3.2.

    Raises GatewayError (400) for a form that asks for no resource.
    """
    if absolute := _ABSOLUTE_FORM.match(target):
        target = target[absolute.end() :]
        if not target.startswith("/"):
            target = "/" + target
    if not target.startswith("/") or "#" in target:
        raise bad_request(f"the request target must be a path, got {target[:80]!r}")
    return target


class _HttpAnswer(ClientAnswer):
    def __init__(self, request: web.BaseRequest, is_last: Callable[[], bool]) -> None:
        self._request = request
        self._is_last = is_last
        self.status = 0
        self.size = 0
        self.response = web.StreamResponse()

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        headers.setdefault("Server", _SERVER)
        response = web.StreamResponse(
            status=status, reason=reason or _phrase(status), headers=headers
        )
        if self._is_last() or self._ends_connection(headers):
            response.force_close()
        self.response = response
        self.status = status
        self.started = True
        await response.prepare(self._request)

    def _ends_connection(self, headers: CIMultiDict[str]) -> bool:
        """Tell whether nothing can follow this answer on its connection."""
        request = self._request
        if request.version < HttpVersion11 and "Content-Length" not in headers:
            return True  # nothing else tells where its body ends
        if request.content.is_eof():
            return False
        # What comes next may be the body or, where the client waited to be told, a request.
        return request.content.exception() is not None or _expects_continue(request)

    async def write(self, data: bytes) -> None:
        if self._request.method == "HEAD":
            return  # RFC 9110, section 9.3.2: the headers alone are the answer
        self.size += len(data)
        await self.response.write(data)

    async def finish(self) -> None:
        await self.response.write_eof()

    def abort(self) -> None:
        self.response.force_close()
        _reset(self._request.transport)


def _reset(transport: asyncio.Transport | None) -> None:
    """Drop a connection: a plain close would look like a body's end to a client of HTTP/1.0."""
    if transport is not None and not transport.is_closing():
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        transport.abort()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
