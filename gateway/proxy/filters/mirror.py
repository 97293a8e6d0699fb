"""Mirrors a share of the requests to another upstream and discards the responses.

A mirrored request is a call like any other, with a buffered body and a client that discards the
response. It starts once the client's own request was read to its end. The client's call neither
waits for it nor learns of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.observe.call_record import CallRecord
from gateway.observe.call_trace import CallTrace
from gateway.observe.gateway_metrics import MirrorMetrics
from gateway.observe.mirror_stats import MirrorStats
from gateway.protocol.operations import OPERATION_KINDS, Operation
from gateway.proxy.destination import Destination
from gateway.proxy.interfaces import Call, ClientRequest, ClientResponse, HeaderLines
from gateway.sizes import QUOTED_TEXT
from gateway.upstream.metadata_cache import UpstreamResponseError

MIRRORED_KINDS = OPERATION_KINDS["infer"] | OPERATION_KINDS["generate"]
"""Operations that are mirrored: they change nothing at a server."""

_CLIENT_ERRORS = frozenset(
    (ErrorKind.BAD_REQUEST, ErrorKind.TOO_LARGE, ErrorKind.UNSUPPORTED_ENCODING)
)
"""Errors of the request itself, which no server has seen; its client gets the same error."""

_log = logging.getLogger("tensorgate.mirror")


class Mirror:
    """Sends copies of requests to ``destination`` and discards the responses.

    ``share`` is the part of all requests to mirror, 0 to 1. ``serve`` serves a call; ``clock``
    returns seconds. At most ``max_concurrent`` copies are in flight; others are skipped.
    """

    def __init__(
        self,
        destination: Destination,
        share: float,
        serve: Callable[[Call], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        max_concurrent: int = 64,
        metrics: MirrorMetrics | None = None,
    ) -> None:
        self.destination = destination
        self.share = share
        self.stats = MirrorStats(destination.upstream.name, clock, metrics)
        self._serve = serve
        self._max_concurrent = max_concurrent
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Return the number of copies in flight."""
        return len(self._tasks)

    def has_room(self) -> bool:
        """Tell whether one more copy may be in flight; count it as skipped if not."""
        if self._closed:
            return False
        if self.in_flight >= self._max_concurrent:
            self.stats.count_skipped(
                f"{self._max_concurrent} copies are in progress (mirror.max_concurrent)"
            )
            return False
        return True

    def sample(self, random: Callable[[], float]) -> Mirror | None:
        """Return the mirror if the next request is to be copied to it.

        ``random`` returns numbers in [0, 1).
        """
        return self if random() < self.share and self.has_room() else None

    def send(self, copy: MirroredRequest) -> None:
        """Send a copy in a task; it is dropped if too many are in flight."""
        if not self.has_room():
            copy.drop()
            return
        task = asyncio.get_running_loop().create_task(self._run(copy))
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_done, copy))

    async def close(self) -> None:
        """Cancel the copies in flight, and send no more."""
        self._closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.stats.flush()

    async def _run(self, copy: MirroredRequest) -> None:
        record = CallRecord(copy.method, copy.target, started=time.perf_counter())
        record.trace = copy.trace
        response = DiscardResponse(record)
        try:
            await self._serve_copy(copy, response)
        finally:
            record.status = response.final_status
            self.stats.observe(record)
            _report_trace(copy, response)

    async def _serve_copy(self, copy: MirroredRequest, response: DiscardResponse) -> None:
        try:
            with self.destination.limits.new_deadline() as deadline:
                await self._serve(Call(copy, response, copy.operation, self.destination, deadline))
            failure = response.failure
        except UpstreamResponseError as error:
            strip_tracebacks(error)
            failure, response.status = _describe_response(error.status, error.body), error.status
        except GatewayError as error:
            strip_tracebacks(error)
            response.record.set_error(error)
            if error.kind in _CLIENT_ERRORS:
                return
            failure = error.message
        except Exception:
            # An error in the gateway itself must never be silent.
            _log.exception("mirroring %s %s failed", copy.method, copy.target)
            failure = "the gateway failed"
        self.stats.count_sent(failure, 0 if response.record.error else response.final_status)

    def _on_done(self, copy: MirroredRequest, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        copy.drop()


class MirroredRequest(ClientRequest):
    """A copy of a request, which buffers the body and is sent once the body is complete.

    Its memory is reserved until it is dropped.
    """

    def __init__(
        self,
        mirror: Mirror,
        method: str,
        target: str,
        headers: CIMultiDictProxy[str],
        content_length: int | None,
        operation: Operation,
        record: CallRecord,
    ) -> None:
        self.record = record
        """That of the client's call."""
        self.trace: CallTrace | None = None
        if record.trace is not None:
            self.trace = record.trace.copy_for_mirror(mirror.destination.upstream.name)
        self.method = method
        self.target = target
        self.headers = headers
        self.content_length = content_length
        self.operation = operation
        self._mirror = mirror
        self._reservation = mirror.destination.memory_budget.reserve()
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._collecting = True

    def add(self, piece: bytes | memoryview) -> None:
        """Add the next piece of the body, empty at its end."""
        if not self._collecting:
            return
        self._size += len(piece)
        cap = self._mirror.destination.limits.max_buffered_body_bytes
        if max(self._size, self.content_length or 0) > cap:
            self._skip(f"its body is larger than {cap} bytes (limits.max_buffered_body_bytes)")
            return
        try:
            self._reservation.resize(self._size)
        except GatewayError as error:
            self._skip(error.message)
            return
        if piece:
            self._pieces.append(bytes(piece))  # a memoryview would pin its whole slab
        if self._size == self.content_length or not piece:
            self._collecting = False
            self._mirror.send(self)

    async def read(self) -> bytes | memoryview:
        """Return the next piece, empty at the end; yields to other tasks in between."""
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        self._size -= len(piece)
        self._reservation.resize(self._size)
        await asyncio.sleep(0)
        return piece

    def drop(self) -> None:
        """Release the buffered body."""
        self._collecting = False
        self._pieces.clear()
        self._size = 0
        self._reservation.resize(0)

    def end(self) -> None:
        """Drop a body that is incomplete when the client's call ends."""
        if self._collecting:
            self.drop()

    def _skip(self, why: str) -> None:
        self._mirror.stats.count_skipped(why)
        self.drop()


@contextmanager
def tee(
    request: ClientRequest, operation: Operation, mirror: Mirror, record: CallRecord
) -> Iterator[ClientRequest]:
    """Yield the request to read instead; its body goes to the mirror too."""
    length = request.content_length
    copy = MirroredRequest(
        mirror, request.method, request.target, request.headers, length, operation, record
    )
    copy.carries_trailers = request.carries_trailers
    if length == 0:
        copy.add(b"")  # an absent body is never read
    try:
        yield _TeedRequest(request, copy)
    finally:
        copy.end()


class _TeedRequest(ClientRequest):
    """A client's request whose body is copied as it is read."""

    def __init__(self, request: ClientRequest, copy: MirroredRequest) -> None:
        self.method = request.method
        self.target = request.target
        self.headers = request.headers
        self.content_length = request.content_length
        self.carries_trailers = request.carries_trailers
        self._request = request
        self._copy = copy

    async def read(self) -> bytes | memoryview:
        """Return the next piece of the body."""
        piece = await self._request.read()
        self._copy.add(piece)
        return piece


class DiscardResponse(ClientResponse):
    """Discards a response, but for the start of an error."""

    def __init__(self, record: CallRecord) -> None:
        self.record = record
        self.status = 0
        self._quoted = b""

    @property
    def failure(self) -> str:
        """Describe a response that is an error; empty if all is well."""
        if self.record.grpc_status > 0:
            return self.record.error or f"the server returned {self.record.server_error}"
        return _describe_response(self.status, self._quoted) if self.status >= 400 else ""

    @property
    def final_status(self) -> int:
        """Return the HTTP status, or that which stands for the status of gRPC."""
        return self.record.status or self.status

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Keep the status."""
        self.started = True
        self.status = status

    async def write(self, data: bytes | memoryview) -> None:
        """Discard a part of the body, but for its first characters."""
        self._quoted += data[: QUOTED_TEXT - len(self._quoted)]

    async def finish(self, trailers: HeaderLines = ()) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""


def _report_trace(copy: MirroredRequest, response: DiscardResponse) -> None:
    """Report the span of a copy, if the client's call is traced."""
    record, main = response.record, copy.record
    if record.trace is None:
        return
    record.seconds = time.perf_counter() - record.started
    record.labels, record.request_id = main.labels, main.request_id
    try:
        record.trace.report(record)
    except Exception:
        _log.exception("the span of a mirrored request was not reported")


def _describe_response(status: int, body: bytes) -> str:
    return f"the response was {status}: {body[:QUOTED_TEXT].decode(errors='replace')!r}"
