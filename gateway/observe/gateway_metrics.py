"""Counts what happens beside the calls themselves: refusals, queues, failing endpoints, mirrors.

Each part of the gateway gets the counters that are its own, and counts at once. So nothing is lost
when a worker is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.observe import families
from gateway.observe.call_record import CallRecord
from gateway.observe.metric_cells import Counter
from gateway.observe.metric_store import MetricWriter


class LimitMetrics:
    """What the concurrency limit of an upstream counts; without a name, that of all calls."""

    def __init__(self, writer: MetricWriter, upstream: str) -> None:
        self.full = writer.counter(families.REFUSALS, ("concurrency", upstream))
        """Calls that found no slot and no room in the queue."""
        self.timed_out = writer.counter(families.REFUSALS, ("queue_timeout", upstream))
        """Calls that waited too long."""
        self.wait = writer.histogram(families.QUEUE_WAIT, (upstream,))
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
        self.exported = writer.counter(families.EXPORTED_SPANS)
        reasons = ("queue_full", "export_failed", "rejected", "too_many_attempts", "shutdown")
        self.dropped = {each: writer.counter(families.DROPPED_SPANS, (each,)) for each in reasons}
        """By the reason."""


class OffloadMetrics:
    """What the user of offload threads counts."""

    def __init__(self, writer: MetricWriter) -> None:
        self.offloaded = writer.counter(families.OFFLOAD_JOBS, ("offloaded",))
        self.local = writer.counter(families.OFFLOAD_JOBS, ("local",))


class GatewayMetrics:
    """Finds the counters of the parts of one worker.

    ``on_mirrored`` gets the record of each mirrored request that has ended.
    """

    def __init__(self, writer: MetricWriter, on_mirrored: MirrorObserver = lambda _: None) -> None:
        self.writer = writer
        self._on_mirrored = on_mirrored
        self.event_loop_lag = writer.histogram(families.EVENT_LOOP_LAG)
        self.dropped_log_lines = writer.counter(families.DROPPED_LOG_LINES)
        self._cpu_seconds = writer.counter(families.CPU_SECONDS)
        self._counted_cpu_seconds = 0.0

    def memory_refusals(self, limit: str) -> Counter:
        """Return the counter of calls for which there was no memory."""
        return self.writer.counter(families.REFUSALS, (limit, ""))

    def mirror(self, route: str, upstream: str) -> MirrorMetrics:
        """Return the counters of a route's mirror."""
        results = {
            result: self.writer.counter(families.MIRROR_REQUESTS, (route, upstream, result))
            for result in ("ok", "rejected", "failed", "skipped")
        }
        return MirrorMetrics(results, self._on_mirrored)

    def count_failure(self, upstream: str, endpoint: str, kind: str) -> None:
        """Count a failed call to an endpoint."""
        self.writer.counter(families.ENDPOINT_FAILURES, (upstream, endpoint, kind)).add(1.0)

    def count_ejection(self, upstream: str, endpoint: str) -> None:
        """Count an ejection of an endpoint."""
        self.writer.counter(families.EJECTIONS, (upstream, endpoint)).add(1.0)

    def count_cpu_time(self) -> None:
        """Count the CPU time of this process since the last time."""
        total = time.process_time()
        self._cpu_seconds.add(total - self._counted_cpu_seconds)
        self._counted_cpu_seconds = total
