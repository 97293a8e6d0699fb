"""Makes exchanges of the requests that come on connections, each in the way that fits it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import lru_cache

from gateway.errors import GatewayError, strip_tracebacks
from gateway.http1.head import RequestHead
from gateway.listener.connection import ClientConnection
from gateway.listener.connection_host import ConnectionHost, Continuation, IdleTimeouts
from gateway.listener.messages import HttpRequest, HttpResponse, origin_form
from gateway.observe.access_log import AccessLog
from gateway.proxy.dispatch import INTERNAL_ERROR, send_error
from gateway.proxy.fast_path.call import CallPlan, FastPathCall
from gateway.proxy.fast_path.planner import FastPath
from gateway.proxy.filters.forwarded_headers import ForwardedPolicy
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.sizes import CACHED_HEADS
from gateway.system.buffers import BufferAccount
from gateway.system.hangups import HangupWatch

_log = logging.getLogger("tensorgate.listener")

RequestHandler = Callable[[ClientRequest, ClientResponse], Awaitable[None]]


class RequestDispatcher(ConnectionHost):
    """Makes an exchange of each request, and knows those that are under way.

    It is a base of the listener, and no part: connections call it for each request, and each call
    that is handed on would cost all of them.
    """

    def __init__(
        self,
        exchange: RequestHandler,
        straight: FastPath | None,
        access_log: AccessLog | None,
        patience: IdleTimeouts,
        forwarding: ForwardedPolicy,
        buffers: BufferAccount,
    ) -> None:
        self.draining = False
        self.buffers = buffers
        self.hangups = HangupWatch()
        self.patience = patience
        self.forwarding = forwarding
        self._exchange = exchange
        self._straight = straight
        self._plan = lru_cache(maxsize=CACHED_HEADS)(self._make_plan)
        self._access_log = access_log
        self._loop = asyncio.get_running_loop()
        self._active_calls: dict[asyncio.Task[None] | FastPathCall, ClientConnection] = {}

    @property
    def requests(self) -> int:
        """Give how many requests are under way."""
        return len(self._active_calls)

    def start_fast_path(
        self, connection: ClientConnection, head: RequestHead, body: bytes | memoryview
    ) -> FastPathCall | None:
        """Make an exchange of a request at hand; None if it goes the ordinary way."""
        if self._straight is None:
            return None
        try:
            plan = self._plan(head)
            if plan is None:
                return None
            exchange = self._straight.start(plan, bytes(body), connection)
        except Exception:
            where = (connection.request_id or "-", head.method, head.target)
            _log.exception("request %s: %s %s failed on the straight way", *where)
            return None  # the ordinary way answers, with that fault or without
        if exchange is not None:
            self._active_calls[exchange] = connection
        return exchange

    def clear_plan_cache(self) -> None:
        """Look anew at what becomes of requests, as that has changed."""
        self._plan.cache_clear()

    def _make_plan(self, head: RequestHead) -> CallPlan | None:
        if self._straight is None or head.length is None:
            return None
        try:
            target = origin_form(head.target)
        except GatewayError:
            return None  # the ordinary way says what is wrong with it
        return self._straight.plan(head.method, target, head.headers, head.length)

    def begin(
        self,
        connection: ClientConnection,
        request: HttpRequest,
        answer: HttpResponse,
        rest: Continuation | None = None,
    ) -> asyncio.Task[None]:
        """Have a task make an exchange of a request, or the rest of one."""
        task = self._loop.create_task(self._serve(connection, request, answer, rest))
        self._active_calls[task] = connection
        task.add_done_callback(self.over)
        return task

    def over(self, exchange: asyncio.Task[None] | FastPathCall) -> None:
        """Note that an exchange has ended."""
        del self._active_calls[exchange]

    def log(
        self, head: RequestHead, status: int, size: int, seconds: float, request_id: str
    ) -> None:
        """Write a line of the access log."""
        if self._access_log is not None:
            self._access_log.write(head.method, head.target, status, size, seconds, request_id)

    async def _serve(
        self,
        connection: ClientConnection,
        request: HttpRequest,
        answer: HttpResponse,
        rest: Continuation | None,
    ) -> None:
        try:
            await self._run(request, answer, rest)
        except asyncio.CancelledError as error:
            strip_tracebacks(error)  # the task keeps it, and the frames lead back to the task
            raise
        finally:
            connection.answered(answer)

    async def _run(
        self, request: HttpRequest, answer: HttpResponse, rest: Continuation | None
    ) -> None:
        try:
            if rest is None:
                request.target = origin_form(request.target)
                await self._exchange(request, answer)
            else:
                await rest(answer)
        except GatewayError as error:
            await send_error(answer, strip_tracebacks(error))
        except ConnectionError as error:
            strip_tracebacks(error)  # the client is gone
        except Exception as error:
            # A fault of our own: never a silent one, and never one that takes the process along.
            where = (answer.request_id or "-", request.method, request.target)
            _log.exception("request %s: %s %s failed", *where)
            strip_tracebacks(error)
            if answer.started:
                answer.abort()
            else:
                answer.last = True
                await send_error(answer, INTERNAL_ERROR)
