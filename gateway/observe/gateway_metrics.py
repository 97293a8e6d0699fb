"""Counts what happens beside the calls themselves: refusals, queues, failing endpoints, mirrors.

Each part of the gateway gets the counters that are its own, and counts at once. So nothing is lost
when a worker is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.observe.call_record import CallRecord
from gateway.observe.metric_cells import Counter
from gateway.observe.metric_store import CounterFamily, HistogramFamily, MetricWriter

_WAIT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""In seconds."""

ENDPOINT_LABELS = ("upstream", "endpoint")

REFUSALS = CounterFamily(
    "tensorgate_refusals",
    "Calls that a limit refused: concurrency, queue_timeout, memory or mirror_memory.",
    ("limit", "upstream"),
)
QUEUE_WAIT = HistogramFamily(
    "tensorgate_queue_wait_seconds",
    "Time for which calls waited because all slots were taken.",
    ("upstream",),
    _WAIT_BUCKETS,
)
ENDPOINT_FAILURES = CounterFamily(
    "tensorgate_endpoint_failures",
    "Failed calls to the endpoint, by how they failed.",
    (*ENDPOINT_LABELS, "kind"),
)
EJECTIONS = CounterFamily(
    "tensorgate_ejections",
    "Ejections of the endpoint because calls to it failed.",
    ENDPOINT_LABELS,
)
MIRROR_REQUESTS = CounterFamily(
    "tensorgate_mirror_requests",
    "Mirrored requests: ok, rejected with 4xx, failed, or skipped because too many were in"
    " progress.",
    ("route", "upstream", "result"),
)
OFFLOAD_JOBS = CounterFamily(
    "tensorgate_offload_jobs",
    "Conversions of 16 KiB and more: offloaded to threads, or local as these were busy.",
    ("result",),
)
EVENT_LOOP_LAG = HistogramFamily(
    "tensorgate_event_loop_lag_seconds",
    "How late a timer of the event loop was, four times a second in each worker.",
    (),
    _LAG_BUCKETS,
)
DROPPED_LOG_LINES = CounterFamily(
    "tensorgate_access_log_dropped_lines",
    "Lines of the access log that were dropped because they could not be written.",
)
EXPORTED_SPANS = CounterFamily(
    "tensorgate_trace_spans_exported", "Spans of traced calls that the receiver has taken."
)
DROPPED_SPANS = CounterFamily(
    "tensorgate_trace_spans_dropped",
    "Spans of traced calls that were dropped: queue_full, export_failed, rejected,"
    " too_many_attempts or shutdown.",
    ("reason",),
)
RELOADS = CounterFamily("tensorgate_reloads", "Reloads that took effect.")
RELOAD_FAILURES = CounterFamily("tensorgate_reload_failures", "Reloads that failed.")
WORKER_RESTARTS = CounterFamily(
    "tensorgate_worker_restarts",
    "Workers that were started because another one had ended unexpectedly.",
)
CPU_SECONDS = CounterFamily(
    "process_cpu_seconds", "User and system CPU time of all workers in seconds."
)

GATEWAY_FAMILIES = (
    REFUSALS,
    QUEUE_WAIT,
    ENDPOINT_FAILURES,
    EJECTIONS,
    MIRROR_REQUESTS,
    OFFLOAD_JOBS,
    EVENT_LOOP_LAG,
    DROPPED_LOG_LINES,
    EXPORTED_SPANS,
    DROPPED_SPANS,
    RELOADS,
    RELOAD_FAILURES,
    WORKER_RESTARTS,
    CPU_SECONDS,
)
"""What a store must have for GatewayMetrics, and for who reads the settings."""


class LimitMetrics:
    """What the concurrency limit of an upstream counts; without a name, that of all calls."""

    def __init__(self, writer: MetricWriter, upstream: str) -> None:
        self.full = writer.counter(REFUSALS, ("concurrency", upstream))
        """Calls that found no slot and no room in the queue."""
        self.timed_out = writer.counter(REFUSALS, ("queue_timeout", upstream))
        """Calls that waited too long."""
        self.wait = writer.histogram(QUEUE_WAIT, (upstream,))
        """Seconds that calls waited, also those that waited too long."""


MirrorObserver = Callable[[CallRecord], None]
"""Gets the record of each mirrored request that has ended."""


@dataclass(frozen=True, slots=True)
class MirrorMetrics:
    """What a mirror counts."""

    results: Mapping[str, Counter]
    """Requests, by what became of them."""
    observe: MirrorObserver
    """Counts what was sent to endpoints."""


class TraceMetrics:
    """What the exporter of traces counts, all in spans."""

    def __init__(self, writer: MetricWriter) -> None:
        self.exported = writer.counter(EXPORTED_SPANS)
        self.queue_full = writer.counter(DROPPED_SPANS, ("queue_full",))
        self.failed = writer.counter(DROPPED_SPANS, ("export_failed",))
        self.rejected = writer.counter(DROPPED_SPANS, ("rejected",))
        self.too_many = writer.counter(DROPPED_SPANS, ("too_many_attempts",))
        self.at_shutdown = writer.counter(DROPPED_SPANS, ("shutdown",))


class OffloadMetrics:
    """What the user of offload threads counts."""

    def __init__(self, writer: MetricWriter) -> None:
        self.offloaded = writer.counter(OFFLOAD_JOBS, ("offloaded",))
        self.local = writer.counter(OFFLOAD_JOBS, ("local",))


class GatewayMetrics:
    """Finds the counters of the parts of one worker.

    ``on_mirrored`` gets the record of each mirrored request that has ended.
    """

    def __init__(self, writer: MetricWriter, on_mirrored: MirrorObserver = lambda _: None) -> None:
        self.writer = writer
        self._on_mirrored = on_mirrored
        self.event_loop_lag = writer.histogram(EVENT_LOOP_LAG)
        self.dropped_log_lines = writer.counter(DROPPED_LOG_LINES)
        self._cpu_seconds = writer.counter(CPU_SECONDS)
        self._counted_cpu_seconds = 0.0

    def memory_refusals(self, limit: str) -> Counter:
        """Return the counter of calls for which there was no memory."""
        return self.writer.counter(REFUSALS, (limit, ""))

    def mirror(self, route: str, upstream: str) -> MirrorMetrics:
        """Return the counters of a route's mirror."""
        results = {
            result: self.writer.counter(MIRROR_REQUESTS, (route, upstream, result))
            for result in ("ok", "rejected", "failed", "skipped")
        }
        return MirrorMetrics(results, self._on_mirrored)

    def count_failure(self, upstream: str, endpoint: str, kind: str) -> None:
        """Count a failed call to an endpoint."""
        self.writer.counter(ENDPOINT_FAILURES, (upstream, endpoint, kind)).add(1.0)

    def count_ejection(self, upstream: str, endpoint: str) -> None:
        """Count an ejection of an endpoint."""
        self.writer.counter(EJECTIONS, (upstream, endpoint)).add(1.0)

    def count_cpu_time(self) -> None:
        """Count the CPU time of this process since the last time."""
        total = time.process_time()
        self._cpu_seconds.add(total - self._counted_cpu_seconds)
        self._counted_cpu_seconds = total
