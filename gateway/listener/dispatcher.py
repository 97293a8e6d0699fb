"""Dispatches requests to the fast path or to a task, and keeps track of the active calls."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from gateway.errors import GatewayError, strip_tracebacks
from gateway.http1.deferrals import BodyDeferrals
from gateway.http1.head import HeadParser, RequestHead
from gateway.listener.connection_host import (
    Call,
    CallClient,
    Continuation,
    IdleTimeouts,
    ListenerConnection,
)
from gateway.listener.messages import ListenerResponse, to_origin_form
from gateway.observe.call_record import CallLabels, CallObserver, CallRecord
from gateway.proxy.calls.buffered import BufferedCall
from gateway.proxy.calls.planner import BufferedPlan, GrpcPlan, Planner
from gateway.proxy.errors import INTERNAL_ERROR, send_error
from gateway.proxy.filters.forwarded_headers import (
    FORWARDED_KEYS,
    NO_FORWARDED_HEADERS,
    NOTED_HEADERS,
)
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.system.buffers import BufferAccount
from gateway.system.hangups import HangupWatch

_log = logging.getLogger("tensorgate.listener")

RequestHandler = Callable[[ClientRequest, ClientResponse], Awaitable[None]]
"""Handles a request on the streaming path."""


class RequestDispatcher(ABC):
    """Starts a call for each request, on the fast path if it can: the host of connections.

    The listener inherits it, because a delegated method call would cost time for each request.
    """

    def __init__(
        self,
        handler: RequestHandler,
        observers: tuple[CallObserver, ...],
        buffers: BufferAccount,
    ) -> None:
        self.draining = False
        self.trace_sampler: TraceSampler | None = None
        """Decides which calls are traced; None if none is."""
        self.buffers = buffers
        self.hangups = HangupWatch()
        self.idle_timeouts = IdleTimeouts()
        self.forwarding = NO_FORWARDED_HEADERS
        self._handler = handler
        self.set_planner(None)
        self.observers = observers
        self._loop = asyncio.get_running_loop()
        self._active_calls: dict[Call, CallClient] = {}
        self.deferrals = BodyDeferrals()

    @abstractmethod
    def add_connection(self, connection: ListenerConnection) -> None:
        """Register a new connection."""

    @abstractmethod
    def remove_connection(self, connection: ListenerConnection) -> None:
        """Unregister a closed connection."""

    @abstractmethod
    def replace_connection(self, old: ListenerConnection, new: ListenerConnection) -> None:
        """Register what serves an open connection from now on."""

    @property
    def requests(self) -> int:
        """The number of active calls."""
        return len(self._active_calls)

    def fast_path_labels(self, head: RequestHead) -> CallLabels | None:
        """Return the labels of a request if it can take the fast path once its body is there."""
        plan = self._plan(head)
        if plan is None:
            return None
        if head.length is None:
            # gRPC does not say how long a body is, and most are small.
            return plan.labels if isinstance(plan, GrpcPlan) else None
        return plan.labels if head.length <= plan.max_size else None

    def prepare_fast_path(
        self, client: CallClient, head: RequestHead, body: bytes | memoryview
    ) -> BufferedCall | None:
        """Prepare a fully buffered request for the fast path; None if it must be streamed.

        Nothing is sent yet. The client owns the call: it registers it with ``add_call``, and then
        starts it, or cancels it. The call ends with ``respond`` or ``continue_in_task`` of the
        client.
        """
        plan = self._plan(head)
        if plan is None or self._planner is None or len(body) > plan.max_size:
            return None
        try:
            return self._planner.prepare(plan, head, bytes(body), client)
        except Exception:
            self._log_failure(client.record.request_id, head)
            return None  # nothing was sent; the streaming path responds

    def _plan(self, head: RequestHead) -> BufferedPlan | None:
        if self._planner is None:
            return None
        try:
            return self._planner.plan(head, to_origin_form(head.target))
        except GatewayError:
            return None  # the streaming path responds with the error
        except Exception:
            self._log_failure("", head)
            return None

    @staticmethod
    def _log_failure(request_id: str, head: RequestHead) -> None:
        where = (request_id or "-", head.method, head.target)
        _log.exception("request %s: %s %s failed on the fast path", *where)

    def set_planner(self, planner: Planner | None) -> None:
        """Plan calls by this planner, and read heads as it needs them, from now on."""
        self._planner = planner
        self.head_parser = (
            HeadParser(FORWARDED_KEYS, NOTED_HEADERS) if planner is None else planner.head_parser
        )

    def clear_plans(self) -> None:
        """Forget the cached plans, because API keys have changed."""
        if self._planner is not None:
            self._planner.clear_plans()

    def start_task(
        self,
        client: CallClient,
        request: ClientRequest,
        response: ListenerResponse,
        rest: Continuation | None = None,
    ) -> asyncio.Task[None]:
        """Start a task that handles a request, or the rest of a fast-path call.

        It ends with ``finish_call`` of the client.
        """
        task = self._loop.create_task(self._handle(client, request, response, rest))
        self._active_calls[task] = client
        task.add_done_callback(self.remove_call)
        return task

    def add_call(self, call: Call, client: CallClient) -> None:
        """Register a call, before it starts."""
        self._active_calls[call] = client

    def remove_call(self, call: Call) -> None:
        """Unregister an ended call; tasks do so by themselves."""
        self._active_calls.pop(call, None)

    def find_waiting(self, seconds: float) -> dict[tuple[str, str, str], float]:
        """Return for how long inference calls have waited for their endpoints: the oldest of each.

        By upstream, URL and model. Only calls that were sent at least ``seconds`` ago count, and
        only if their whole request is there, and nothing of their response.
        """
        found: dict[tuple[str, str, str], float] = {}
        now = time.perf_counter()
        for client in self._active_calls.values():
            record = client.record
            if now - record.started < seconds:
                break  # all further ones have begun later, so that it costs nothing for most calls
            if record.waits_for_inference and client.has_sent_all:
                key = record.upstream, record.endpoint, record.labels.model
                found[key] = max(found.get(key, seconds), now - record.sent_at)
        return {key: waited for key, waited in found.items() if waited > seconds}

    def observe_call(self, record: CallRecord) -> None:
        """Give the record of an ended call to the observers."""
        for observer in self.observers:
            try:
                observer(record)
            except Exception:
                # The client has its response already, and the connection must go on.
                _log.exception("an observer of calls failed")

    async def _handle(
        self,
        client: CallClient,
        request: ClientRequest,
        response: ListenerResponse,
        rest: Continuation | None,
    ) -> None:
        try:
            await self._call_handler(request, response, rest)
        except asyncio.CancelledError as error:
            strip_tracebacks(error)  # the task holds the error, and its frames hold the task
            raise
        finally:
            client.finish_call(response)

    async def _call_handler(
        self, request: ClientRequest, response: ListenerResponse, rest: Continuation | None
    ) -> None:
        try:
            if rest is None:
                request.target = to_origin_form(request.target)
                await self._handler(request, response)
            else:
                await rest(response)
        except GatewayError as error:
            await send_error(response, strip_tracebacks(error))
        except ConnectionError as error:
            strip_tracebacks(error)  # the client is gone
        except Exception as error:
            # A bug of the gateway: log it, and go on serving other calls.
            where = (response.record.request_id or "-", request.method, request.target)
            _log.exception("request %s: %s %s failed", *where)
            strip_tracebacks(error)
            if response.started and not response.take_back():
                response.record.set_error(INTERNAL_ERROR)
                response.abort()
            else:
                response.last = True
                await send_error(response, INTERNAL_ERROR)
