"""HTTP/1.1 from clients, on aiohttp's low-level server.

All that depends on aiohttp's server is in this file.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

import orjson
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict

from gateway.errors import GatewayError, bad_request
from gateway.exchange.base import ClientAnswer, ClientRequest
from gateway.exchange.dispatch import answer_error
from gateway.observe.access_log import AccessLog

READ_BUFFER = 256 * 1024
"""Bytes of a request's body that are read ahead of its reader, doubled at most."""

_MAX_HEADER = 64 * 1024
_BACKLOG = 1024

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
        busy = set(self._busy.values())
        for connection in self._web.connections:
            if connection not in busy:
                connection.close()
        late: set[asyncio.Task[None]] = set()
        if self._busy:
            _, late = await asyncio.wait(self._busy, timeout=patience)
        await self._web.shutdown(timeout=0)
        return len(late)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._busy[task] = request.protocol
        answer = _HttpAnswer(request, self._draining)
        started = asyncio.get_running_loop().time()
        try:
            await self._run(request, answer)
        finally:
            del self._busy[task]
            if self._access_log is not None:
                seconds = asyncio.get_running_loop().time() - started
                self._access_log.write(
                    request.method, request.raw_path, answer.status, answer.size, seconds
                )
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
            message = f"malformed HTTP request: {exc.message.splitlines()[0]}"
        else:
            message = "the gateway failed; its log says why"
        response = web.Response(
            status=status,
            body=orjson.dumps({"error": message}),
            content_type="application/json",
        )
        response.force_close()
        return response


class _HttpRequest(ClientRequest):
    def __init__(self, request: web.BaseRequest) -> None:
        self.method = request.method
        self.target = _origin_form(request.raw_path)
        self.headers = request.headers
        self.content_length = request.content_length
        if self.content_length is None and not request.body_exists:
            self.content_length = 0
        self._request = request

    async def chunks(self) -> AsyncIterator[bytes]:
        # RFC 9110, section 10.1.1: the client may be waiting for this before it sends its body.
        if self._request.headers.get("Expect", "").lower() == "100-continue":
            self._send_continue()
        content = self._request.content
        try:
            # readchunk, unlike readany, does not join what has come in several pieces.
            while (piece := await content.readchunk()) != (b"", False):
                if piece[0]:
                    yield piece[0]
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise bad_request(f"the request's body is broken: {error}") from error

    def _send_continue(self) -> None:
        transport = self._request.transport
        if transport is not None and self._request.version >= (1, 1):
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _origin_form(target: str) -> str:
    """Give a request target as path and query; RFC 9112, section 3.2.

    Raises GatewayError (400) for a form that asks for no resource.
    """
    if target.startswith(("http://", "https://")):
        target = "/" + target.split("://", 1)[1].partition("/")[2]
    if not target.startswith("/") or "#" in target:
        raise bad_request(f"the request target must be a path, got {target[:80]!r}")
    return target


class _HttpAnswer(ClientAnswer):
    def __init__(self, request: web.BaseRequest, last: bool) -> None:
        self._request = request
        self._last = last
        self.status = 0
        self.size = 0
        self.response = web.StreamResponse()

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        headers.setdefault("Server", "tensorgate")
        response = web.StreamResponse(
            status=status, reason=reason or _phrase(status), headers=headers
        )
        if self._last:
            response.force_close()
        self.response = response
        self.status = status
        self.started = True
        await response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        self.size += len(data)
        await self.response.write(data)

    async def finish(self) -> None:
        await self.response.write_eof()

    def abort(self) -> None:
        self.response.force_close()
        if self._request.transport is not None:
            self._request.transport.abort()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
