"""A client's call, from its head to its end, whatever carries it, and the host of all calls."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from gateway.codec.v2.request import InferRequestReader
from gateway.errors import GatewayError, strip_tracebacks
from gateway.http1.connection import BodyBuffer
from gateway.http1.deferrals import BodyDeferrals
from gateway.http1.head import HeadParser, RequestHead
from gateway.listener.body_reading import BodyReading
from gateway.listener.connection_host import IdleTimeouts, ListenerConnection
from gateway.listener.messages import (
    ListenerRequest,
    ListenerResponse,
    error_template,
    to_origin_form,
)
from gateway.listener.open_connections import OpenConnections
from gateway.observe.call_record import CallLabels, CallObserver, CallRecord
from gateway.observe.failure_log import REFUSAL_LOG
from gateway.protocol.messages import InferRequest
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.admission.request_slice import RequestSlice
from gateway.proxy.calls.buffered import BufferedCall, CallPlan
from gateway.proxy.calls.planner import BufferedPlan, GrpcPlan, Planner
from gateway.proxy.errors import INTERNAL_ERROR, error_body, send_error
from gateway.proxy.filters.forwarded_headers import (
    FORWARDED_KEYS,
    NO_FORWARDED_HEADERS,
    NOTED_HEADERS,
    ForwardedHeaders,
    Peer,
)
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.proxy.interfaces import (
    ClientRequest,
    ClientResponse,
    FieldLines,
    HeaderLines,
    ResponseTemplate,
)
from gateway.sizes import CONVERT_CHUNK
from gateway.system.buffers import MAX_WINDOW, BufferAccount, ReservedBytes
from gateway.system.hangups import HangupWatch
from gateway.system.sockets.body_stream import BodyStream

_MAX_IDLE_CHECK_INTERVAL: Final = 5.0
"""Maximum seconds between two checks for idle connections."""
_ANNOUNCED_SHARE: Final = 8
"""Memory for bodies that are read while they arrive may be an eighth of the limit."""
_NO_RECORD: Final = CallRecord("", "")

_log = logging.getLogger("tensorgate.listener")

RequestHandler = Callable[[ClientRequest, ClientResponse], Awaitable[None]]
"""Handles a request on the streaming path."""
Continuation = Callable[[ClientResponse], Awaitable[None]]
"""The rest of a call that started on the fast path."""


class CallSource:
    """What all calls of a connection have in common: the ``peer``, and the host that serves them.

    ``client`` is whose connection it is; see ``client_of``.
    """

    def __init__(self, host: RequestDispatcher, peer: Peer, client: str, is_http2: bool) -> None:
        self.host = host
        self.peer = peer
        self.client = client
        self.is_http2 = is_http2
        self._forwarded = ForwardedHeaders(host.forwarding, peer, is_http2)

    @property
    def address(self) -> str:
        """The address of the client; empty for a Unix socket."""
        return self.peer.address or ""

    def add_headers(self, head: RequestHead) -> tuple[HeaderLines, bytes, str]:
        """Return the headers that servers get with a request, their lines, and its id."""
        forwarding = self.host.forwarding
        if self._forwarded.forwarding is not forwarding:
            self._forwarded = ForwardedHeaders(forwarding, self.peer, self.is_http2)
        return self._forwarded.make(head)


class ClientCall(ABC):
    """A request with its response: the client of its call.

    It waits for the rest of a small body, starts on the fast path or in a task, and ends once.
    Subclasses read and write the messages.
    """

    def __init__(self, source: CallSource, started: float) -> None:
        self.added_headers: HeaderLines = ()
        self.added_lines = b""
        self.carries_trailers = source.is_http2
        self.record = _NO_RECORD
        self.head: RequestHead | None = None
        self.is_deferred = False
        """Whether it waits for the rest of its body."""
        self.ended = False
        self.placed: RequestSlice | None = None
        """The shared memory that the body is received into, if it is."""
        self.infer_request: InferRequest | None = None
        """The request, if its body was read while it arrived."""
        self.reading: BodyReading | None = None
        """Reads the body while it arrives, if anything does."""
        self._source = source
        self._host = source.host
        self._started = started
        self._call: asyncio.Task[None] | BufferedCall | None = None

    @property
    def reserved(self) -> ReservedBytes:
        """Return what the call has reserved."""
        return self.record.reserved

    def begin(self, head: RequestHead) -> CallRecord:
        """Record the start of a call with a valid head."""
        source = self._source
        self.head = head
        self.added_headers, self.added_lines, request_id = source.add_headers(head)
        record = self.record = CallRecord(head.method, head.target, request_id, self._started)
        record.client = source.address
        record.reserved.client = source.client
        record.noted = head.noted
        sampler = self._host.trace_sampler
        if sampler is not None:
            record.trace = sampler.sample(head, source.peer, "2" if source.is_http2 else "1.1")
        return record

    @property
    def expected_size(self) -> int | None:
        """The bytes of the whole body; None if they are not known."""
        assert self.head is not None
        return self.head.length

    def start_buffered(self, data: bytes | memoryview, body: BodyStream | None = None) -> bool:
        """Start on the fast path with a complete body; False if it must be streamed.

        If it starts, a stream with the same ``body`` is discarded.
        """
        assert self.head is not None
        call = self._call = self._host.prepare_fast_path(self, self.head, data)
        if call is None:
            return False
        self._host.add_call(self)
        if body is not None:
            body.discard()
        call.start()
        return True

    def on_received(self, size: int) -> None:
        """Count what has come of the body, and read on if it is read meanwhile."""
        self.record.request_bytes += size
        if self.reading is not None:
            self.reading.arrive(size)

    def start_complete(self, body: BodyStream) -> None:
        """Start a call whose body is complete: on the fast path if the client reads."""
        if self.reading is not None:
            return  # it goes on once all is read
        if self.is_client_slow or not self.start_buffered(body.peek(), body):
            self.start_task()

    def place(
        self, on_read: Callable[[InferRequest | None], None]
    ) -> RequestSlice | BodyBuffer | None:
        """Return memory to receive the body into, so that the fast path has it in one piece.

        It is shared memory, which the call has until its end, if the server may read it there.
        A large body is read meanwhile; see BodyReading for ``on_read``.
        """
        head, reserved = self.head, self.record.reserved
        assert head is not None
        self.placed = self._host.place_body(head, reserved)
        if self.placed is not None:
            return self.placed
        found = self._host.read_early(head, reserved)
        if found is None:
            return None
        reader, reservation, memory = found
        self.reading = BodyReading(reader, reservation, memory, self._source.client, on_read)
        return memory

    def defer(self) -> bool:
        """Wait for the rest of the body if the call can take the fast path with it."""
        head = self.head
        assert head is not None
        is_placed = self.placed is not None or self.reading is not None
        labels = self._host.fast_path_labels(head, is_placed=is_placed)
        if labels is None:
            return False
        self.record.labels = labels
        self.is_deferred = True
        self._host.add_call(self)
        # The server gets nothing of a placed body before all of it is there.
        self._host.deferrals.add(self, None if is_placed else self.expected_size)
        return True

    def end_deferral(self) -> None:
        """Wait no longer."""
        if self.is_deferred:
            self._host.deferrals.remove(self)
            self.is_deferred = False

    def on_timeout(self) -> None:
        """Wait no longer for the rest of the body; see TimeoutListener."""
        self.start_deferred_task()

    def start_deferred_task(self) -> None:
        """Start on the streaming path, which reads the body as it arrives."""
        self.end_deferral()
        self.stop_reading()
        self.start_task()

    def stop_reading(self) -> None:
        """Read no more of the body before the call begins."""
        if self.reading is not None:
            self.reading.stop()
            self.reading = None

    def start_task(self, rest: Continuation | None = None) -> asyncio.Task[None]:
        """Run the call in a task, or the rest of one that has begun."""
        request, response = self._make_messages()
        self._host.add_call(self)
        task = self._call = asyncio.create_task(self._run(request, response, rest))
        task.add_done_callback(self._on_task_end)
        return task

    def continue_in_task(self, rest: Continuation, on_done: Callable[[], None]) -> None:
        """Run the rest of the call in a task; see FastPathClient."""
        self.start_task(rest).add_done_callback(lambda _: on_done())

    async def _run(
        self, request: ClientRequest, response: ListenerResponse, rest: Continuation | None
    ) -> None:
        try:
            await self._respond_to(request, response, rest)
        except asyncio.CancelledError as error:
            strip_tracebacks(error)  # the task holds the error, and its frames hold the task
            raise
        finally:
            self.finish_call(response)

    async def _respond_to(
        self, request: ClientRequest, response: ListenerResponse, rest: Continuation | None
    ) -> None:
        sent: GatewayError | None = None
        try:
            if rest is None:
                request.target = to_origin_form(request.target)
                await self._host.handler(request, response)
            else:
                await rest(response)
        except GatewayError as error:
            sent = strip_tracebacks(error)
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
                sent = INTERNAL_ERROR
        if sent is not None:
            await send_error(response, sent)

    def finish_call(self, response: ListenerResponse) -> None:
        """End the call, whose task has ended."""
        self.end()

    def reject(self, error: GatewayError, *, responds: bool = True) -> None:
        """Respond to a request without a valid head."""
        record = self.make_record("-", "-")
        record.set_error(error)
        what = "HTTP/2 request" if self._source.is_http2 else "request"
        REFUSAL_LOG.warn(f"{what} of {record.client or 'a Unix socket'} refused", error.message)
        if responds:
            self.respond(error_template(error), b"", error_body(error.message), last=True)
        else:
            self.end()

    def cancel(self, why: str) -> None:
        """Cancel the call, as its client is gone."""
        if self.ended:
            return
        call = self._call
        self.record.error = self.record.error or why
        try:
            if call is not None:
                call.cancel()
        finally:
            if not isinstance(call, asyncio.Task):
                self.end()

    def end(self) -> None:
        """Give back what the call holds, then tell of its end."""
        self.end_deferral()
        self.stop_reading()
        if not isinstance(self._call, asyncio.Task):
            self._host.remove_call(self)
        self._call = None  # not before: if this fails, it is done again when the client is gone
        self._release()
        if self.placed is not None:
            self.placed.release()
        self.ended = True
        record = self.record
        # The clock of uvloop counts whole milliseconds.
        record.seconds = time.perf_counter() - record.started
        self._host.observe_call(record)

    def make_record(self, method: str, target: str) -> CallRecord:
        """Record a call without a valid head."""
        record = self.record = CallRecord(method, target, "", self._started)
        record.client = self._source.address
        return record

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Count the call no more; end it if it was cancelled before its task ran."""
        self._host.remove_call(self)
        if self._call is task:
            self.end()

    @property
    @abstractmethod
    def has_sent_all(self) -> bool:
        """Whether the whole request is there."""

    @property
    @abstractmethod
    def is_client_slow(self) -> bool:
        """Whether a response could not be sent at once."""

    @abstractmethod
    def _make_messages(self) -> tuple[ListenerRequest, ListenerResponse]:
        """Return the request and the response for a task."""

    @abstractmethod
    def send_continue(self) -> None:
        """Tell the client to send its body."""

    @abstractmethod
    def respond(
        self,
        template: ResponseTemplate,
        lines: bytes,
        body: bytes | memoryview,
        *,
        last: bool = False,
        trailers: FieldLines = (),
    ) -> None:
        """Send the whole response; see FastPathClient."""

    @abstractmethod
    def drop_call(self) -> None:
        """Cancel the call, so that the client sees that the response is incomplete."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what the call holds of its connection."""


class RequestDispatcher:
    """Starts a call for each request, on the fast path if it can: the host of connections.

    ``on_closed`` is called for each closed connection.

    The listener inherits it, because a delegated method call would cost time for each request.
    """

    def __init__(
        self,
        handler: RequestHandler,
        observers: tuple[CallObserver, ...],
        buffers: BufferAccount,
        on_closed: Callable[[], None],
    ) -> None:
        self.draining = False
        self.trace_sampler: TraceSampler | None = None
        """Decides which calls are traced; None if none is."""
        self.buffers = buffers
        self.hangups = HangupWatch()
        self.idle_timeouts = IdleTimeouts()
        self.forwarding = NO_FORWARDED_HEADERS
        self.handler = handler
        self.set_planner(None)
        self.observers = observers
        self._loop = asyncio.get_running_loop()
        self._active_calls: dict[ClientCall, None] = {}
        self._announced = 0
        """Bytes of the memory for bodies that are read while they arrive."""
        self.deferrals = BodyDeferrals()
        self._on_closed = on_closed
        self._connections = OpenConnections()
        self._idle_check: asyncio.TimerHandle | None = None

    @property
    def requests(self) -> int:
        """The number of active calls."""
        return len(self._active_calls)

    def place_body(self, head: RequestHead, reserved: ReservedBytes) -> RequestSlice | None:
        """Return shared memory to receive the body of a request into, if it may go there."""
        planner = self._planner
        if planner is None or head.length is None or head.length < planner.router.min_shared_bytes:
            return None
        plan = self._plan(head)
        return planner.place(plan, head.length, reserved) if isinstance(plan, CallPlan) else None

    def read_early(
        self, head: RequestHead, reserved: ReservedBytes
    ) -> tuple[InferRequestReader, Reservation, BodyBuffer] | None:
        """Return what reads a large body while it arrives, and memory for it; None if nothing does.

        Memory that is only announced costs its client nothing, so that all together have a limit.
        """
        planner, size, buffers = self._planner, head.length, self.buffers
        if planner is None or size is None or size <= MAX_WINDOW:
            return None
        if (self._announced + size) * _ANNOUNCED_SHARE > buffers.limit or size > buffers.free:
            return None
        plan = self._plan(head)
        found = planner.reader(plan, size, reserved) if isinstance(plan, CallPlan) else None
        if found is None:
            return None
        self._announced += size
        reader, of_reader, of_body = found
        memory = BodyBuffer(size, of_body.resize_unchecked, partial(self._take_back, size))
        return reader, of_reader, memory

    def _take_back(self, size: int) -> None:
        self._announced -= size

    def fast_path_labels(self, head: RequestHead, *, is_placed: bool = False) -> CallLabels | None:
        """Return the labels of a request if it can take the fast path once its body is there."""
        plan = self._plan(head)
        if plan is None:
            return None
        if head.length is None:
            # gRPC does not say how long a body is, and most are small.
            return plan.labels if isinstance(plan, GrpcPlan) else None
        return plan.labels if is_placed or head.length <= plan.max_size else None

    def prepare_fast_path(
        self, client: ClientCall, head: RequestHead, body: bytes | memoryview
    ) -> BufferedCall | None:
        """Prepare a fully buffered request for the fast path; None if it must be streamed.

        Nothing is sent yet. The client owns the call: it registers with ``add_call``, and then
        starts it, or cancels it. The call ends with ``respond`` or ``continue_in_task`` of the
        client.
        """
        plan = self._plan(head)
        if plan is None or self._planner is None:
            return None
        if client.placed is None and client.infer_request is None:
            if len(body) > plan.max_size:
                return None
            if len(body) <= CONVERT_CHUNK:
                body = bytes(body)  # it would pin a slab
        try:
            return self._planner.prepare(plan, head, body, client)
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

    def add_call(self, call: ClientCall) -> None:
        """Register a call, before it starts."""
        self._active_calls[call] = None

    def remove_call(self, call: ClientCall) -> None:
        """Unregister an ended call."""
        self._active_calls.pop(call, None)

    def find_waiting(self, seconds: float) -> dict[tuple[str, str, str], float]:
        """Return for how long inference calls have waited for their endpoints: the oldest of each.

        By upstream, URL and model. Only calls that were sent at least ``seconds`` ago count, and
        only if their whole request is there, and nothing of their response.
        """
        found: dict[tuple[str, str, str], float] = {}
        now = time.perf_counter()
        for call in self._active_calls:
            record = call.record
            if now - record.started < seconds:
                break  # all further ones have begun later, so that it costs nothing for most calls
            if record.waits_for_inference and call.has_sent_all:
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

    def add_connection(self, connection: ListenerConnection) -> None:
        """Register a new connection."""
        self._connections.add(connection)
        if self._idle_check is None and not self.draining:
            self._start_idle_check()

    def replace_connection(self, old: ListenerConnection, new: ListenerConnection) -> None:
        """Register what serves an open connection from now on."""
        self._connections.replace(old, new)

    def remove_connection(self, connection: ListenerConnection) -> None:
        """Unregister a closed connection."""
        self._connections.discard(connection)
        self._on_closed()

    def _close_idle_connections(self) -> None:
        self._for_each_connection(lambda connection: connection.close_if_idle())
        self._start_idle_check()

    def _start_idle_check(self) -> None:
        timeouts = self.idle_timeouts
        shortest = min(
            timeouts.request_header_timeout, timeouts.keep_alive_timeout, timeouts.idle_timeout
        )
        delay = min(_MAX_IDLE_CHECK_INTERVAL, shortest / 2)
        self._idle_check = self._loop.call_later(delay, self._close_idle_connections)

    def _for_each_connection(self, act: Callable[[ListenerConnection], None]) -> None:
        """Call ``act`` with each connection; one that fails is aborted, and stops no other."""
        for connection in tuple(self._connections):
            try:
                act(connection)
            except Exception:
                _log.exception("a connection failed, and is aborted")
                connection.transport.abort()
