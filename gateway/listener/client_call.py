"""A client's call, from its head to its end, whatever carries it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from gateway.errors import GatewayError
from gateway.http1.head import RequestHead
from gateway.listener.connection_host import Continuation
from gateway.listener.dispatcher import RequestDispatcher
from gateway.listener.messages import ListenerRequest, ListenerResponse, error_template
from gateway.observe.call_record import CallRecord
from gateway.observe.failure_log import REFUSAL_LOG
from gateway.proxy.calls.buffered import BufferedCall
from gateway.proxy.errors import error_body
from gateway.proxy.filters.forwarded_headers import ForwardedHeaders, Peer
from gateway.proxy.interfaces import FieldLines, HeaderLines, ResponseTemplate
from gateway.system.buffers import ReservedBytes
from gateway.system.sockets.body_stream import BodyStream


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
    """A request with its response: the CallClient of its call.

    It waits for the rest of a small body, starts on the fast path or in a task, and ends once.
    Subclasses read and write the messages.
    """

    def __init__(self, source: CallSource, record: CallRecord, started: float) -> None:
        self.added_headers: HeaderLines = ()
        self.added_lines = b""
        self.carries_trailers = source.is_http2
        self.record = record
        self.head: RequestHead | None = None
        self.is_deferred = False
        """Whether it waits for the rest of its body."""
        self.ended = False
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

    def start_buffered(self, data: bytes | memoryview, body: BodyStream | None = None) -> bool:
        """Start on the fast path with a complete body; False if it must be streamed.

        If it starts, a stream with the same ``body`` is discarded.
        """
        assert self.head is not None
        call = self._call = self._host.prepare_fast_path(self, self.head, data)
        if call is None:
            return False
        self._host.add_call(call, self)
        if body is not None:
            body.discard()
        call.start()
        return True

    def start_complete(self, body: BodyStream) -> None:
        """Start a call whose body is complete: on the fast path if the client reads."""
        if self.is_client_slow or not self.start_buffered(body.peek(), body):
            self.start_task()

    def defer(self) -> bool:
        """Wait for the rest of the body if the call can take the fast path with it."""
        head = self.head
        assert head is not None
        labels = self._host.fast_path_labels(head)
        if labels is None:
            return False
        self.record.labels = labels
        self.is_deferred = True
        self._host.add_call(self, self)
        self._host.deferrals.add(self, head.length)
        return True

    def end_deferral(self) -> None:
        """Wait no longer."""
        if self.is_deferred:
            self._host.deferrals.remove(self)
            self._host.remove_call(self)
            self.is_deferred = False

    def on_timeout(self) -> None:
        """Wait no longer for the rest of the body; see TimeoutListener."""
        self.start_deferred_task()

    def start_deferred_task(self) -> None:
        """Start on the streaming path, which reads the body as it arrives."""
        self.end_deferral()
        self.start_task()

    def start_task(self, rest: Continuation | None = None) -> asyncio.Task[None]:
        """Run the call in a task, or the rest of one that has begun."""
        request, response = self._make_messages()
        task = self._call = self._host.start_task(self, request, response, rest)
        task.add_done_callback(self._end_cancelled_task)
        return task

    def continue_in_task(self, rest: Continuation, on_done: Callable[[], None]) -> None:
        """Run the rest of the call in a task; see FastPathClient."""
        begun = self._call
        assert isinstance(begun, BufferedCall)
        self.start_task(rest).add_done_callback(lambda _: on_done())
        # Only now, so that the host always counts one of the two.
        self._host.remove_call(begun)

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
        call = self._call
        if isinstance(call, BufferedCall):
            self._host.remove_call(call)
        self._call = None  # not before: if this fails, it is done again when the client is gone
        self._release()
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

    def _end_cancelled_task(self, task: asyncio.Task[None]) -> None:
        """End the call of a task that was cancelled before it ran: it called no ``finish_call``."""
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
