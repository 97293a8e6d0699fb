"""Exports the spans of traced calls, in a thread of its own.

The event loop only queues records. A receiver that is down, slow or failing costs spans, and never
a call: the queue is bounded in bytes, and what does not fit is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gateway.errors import shorten
from gateway.observe.call_record import CallRecord
from gateway.observe.call_trace import CallTrace
from gateway.observe.failure_log import LimitedLog
from gateway.observe.gateway_metrics import TraceMetrics

if TYPE_CHECKING:
    from gateway.observe.tracing.otlp import Sender
    from gateway.observe.tracing.spans import SpanWriter

MAX_QUEUED_BYTES: Final = 4 * 1024 * 1024
"""Bytes of the calls of one worker that wait for their export, or are being exported."""

MAX_BATCH_BYTES: Final = 512 * 1024
"""Bytes of a batch, roughly; receivers take 4 MiB."""

_CALL_BYTES: Final = 4000
"""Bytes that a queued call takes until it is exported, without its texts; see ``size_of``."""
_ATTEMPT_BYTES: Final = 1500
_TEXT_FACTOR: Final = 4
_INTERVAL: Final = 1.0
"""Seconds for which a call waits at most until it is exported."""
_TIMEOUT: Final = 10.0
"""Seconds of an export with its retries."""
FIRST_BACKOFF: Final = 0.5
"""Seconds until the first retry; each further one waits twice as long."""
_FLUSH_TIMEOUT: Final = 2.0
"""Seconds for what is queued at the end."""
_QUOTED: Final = 300

_log = logging.getLogger("tensorgate.traces")


class TraceExporter:
    """Queues the records of traced calls, and exports their spans.

    ``open_parts`` returns what writes spans and what sends them; the thread calls it, since their
    packages take a while to load. It may raise.
    """

    def __init__(
        self,
        endpoint: str,
        open_parts: Callable[[], tuple[SpanWriter, Sender]],
        metrics: TraceMetrics,
        interval: float = _INTERVAL,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self._open_parts = open_parts
        self._metrics = metrics
        self._interval = interval
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[tuple[CallRecord, CallTrace, int, int]] = deque()
        self.queued_bytes = 0
        """Bytes of the calls that wait, or are being exported."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._flush_until = 0.0
        self._sender: Sender | None = None
        self._endpoint = endpoint
        self._failures = LimitedLog("exports of spans failed", log=_log)
        self._is_failing = False
        # A daemon: a receiver that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def observe(self, record: CallRecord) -> None:
        """Queue the record of a call that has ended, if it is traced."""
        trace = record.trace
        if trace is None:
            return
        trace.end_attempt(record)
        started = time.time_ns() - int((time.perf_counter() - record.started) * 1e9)
        size = size_of(record, trace)
        with self._lock:
            is_closed = self._closing.is_set()
            if is_closed or self.queued_bytes + size > self._max_queued_bytes:
                self._drop("shutdown" if is_closed else "queue_full", _least_spans(trace))
                return
            self.queued_bytes += size
            self._queue.append((record, trace, started, size))
            is_batch = self.queued_bytes >= MAX_BATCH_BYTES
        if is_batch:
            self._wake.set()

    def close(self) -> None:
        """Export what is queued, within a bounded time, and end the thread; blocks."""
        with self._lock:
            self._flush_until = time.monotonic() + _FLUSH_TIMEOUT
            self._closing.set()
        self._wake.set()
        self._thread.join(_FLUSH_TIMEOUT)
        sender = self._sender
        if self._thread.is_alive() and sender is not None:
            sender.close()  # ends an export in progress
            self._thread.join(_FLUSH_TIMEOUT)
        self._drop_queue()

    def _run(self) -> None:
        try:
            writer, self._sender = self._open_parts()
        except Exception as error:
            self._log_failure(f"{type(error).__name__}: {error}", 0)
            with self._lock:
                self._closing.set()
            self._drop_queue()
            return
        while not self._closing.is_set():
            self._wake.wait(self._interval)
            self._wake.clear()
            try:
                self._export_queue(writer, self._sender)
            except Exception:
                # An error of our own is logged, and must not end the thread.
                _log.exception("a batch of spans was not exported")
        self._export_queue(writer, self._sender)  # what came before it was closed
        self._sender.close()

    def _export_queue(self, writer: SpanWriter, sender: Sender) -> None:
        while self._queue:
            if self._closing.is_set() and time.monotonic() >= self._flush_until:
                return
            self._export_batch(writer, sender)

    def _export_batch(self, writer: SpanWriter, sender: Sender) -> None:
        request = writer.new_request()
        size = 0
        try:
            while self._queue and size < MAX_BATCH_BYTES:
                record, trace, started, record_size = self._queue.popleft()
                size += record_size
                try:
                    writer.write(request, record, started)
                except Exception:
                    # An error in the gateway itself must never be silent.
                    _log.exception("request %s: its spans failed", record.request_id or "-")
                    self._drop("export_failed", _least_spans(trace))
                self._drop("too_many_attempts", trace.dropped_attempts)
                time.sleep(0)  # lets the event loop have the interpreter's lock
            self._send(request, writer.count(request), sender)
        finally:
            with self._lock:
                self.queued_bytes -= size

    def _send(self, request: Any, count: int, sender: Sender) -> None:
        from gateway.observe.tracing.otlp import ExportError

        until = time.monotonic() + _TIMEOUT
        backoff = FIRST_BACKOFF
        while True:
            try:
                rejected = sender.send(request, max(until - time.monotonic(), 0.1))
                rejected = min(max(rejected, 0), count)  # a receiver may say any number
            except Exception as error:
                is_retryable = isinstance(error, ExportError) and error.is_retryable
                is_late = time.monotonic() + backoff >= until
                if is_late or not is_retryable or self._closing.wait(backoff):
                    self._drop("export_failed", count)
                    self._log_failure(str(error), count)
                    return
                backoff *= 2
            else:
                self._metrics.exported.add(float(count - rejected))
                if rejected:
                    self._drop("rejected", rejected)
                    self._log_failure(f"it rejected {rejected} spans", rejected)
                elif self._is_failing:
                    self._is_failing = False
                    self._failures.flush()
                    _log.info("spans are exported to %s again", self._endpoint)
                return

    def _log_failure(self, reason: str, spans: int) -> None:
        self._is_failing = True
        prefix = f"{spans} spans were not exported to {self._endpoint}"
        self._failures.warn(prefix, shorten(reason, _QUOTED))

    def _drop(self, reason: str, spans: int) -> None:
        self._metrics.dropped[reason].add(float(spans))

    def _drop_queue(self) -> None:
        with suppress(IndexError):  # the thread may still take calls
            while True:
                _, trace, _, size = self._queue.popleft()
                with self._lock:
                    self.queued_bytes -= size
                self._drop("shutdown", _least_spans(trace))


def instance_name() -> str:
    """Return the name of this process among those of the same service."""
    return f"{socket.gethostname()}-{os.getpid()}"


def size_of(record: CallRecord, trace: CallTrace) -> int:
    """Return about the bytes of a call until it is exported: more than its record or spans take."""
    attempts = trace.attempts
    texts = len(record.target) + len(record.error) + len(record.server_error)
    texts += sum([len(each.value) for each in record.noted])
    texts += sum([len(each.target) + len(each.error) for each in attempts])
    texts += len(trace.state) * (len(attempts) + 4)
    return _CALL_BYTES + _ATTEMPT_BYTES * len(attempts) + _TEXT_FACTOR * texts


def _least_spans(trace: CallTrace) -> int:
    """Return how many spans a call has at least: its own and those of its attempts."""
    return 1 + len(trace.attempts)
