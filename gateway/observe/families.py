"""Declares all that the gateway counts: the metrics, and the histograms for percentiles.

Calls are counted in call_metrics.py, what happens beside them in gateway_metrics.py.
"""

from __future__ import annotations

from gateway.observe.metric_cells import FineBuckets
from gateway.observe.metric_store import CounterFamily, CountFamily, Family, HistogramFamily

BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds in seconds: from a health check to the generation of a long text."""
_FINE_BOUNDS = FineBuckets(BUCKETS).bounds
_WAIT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""In seconds."""

ENDPOINT_LABELS = ("upstream", "endpoint")
CALL_LABELS = ("route", "operation", "model", "upstream", "form", "status")

DURATION = HistogramFamily(
    "tensorgate_request_duration_seconds",
    "Time from the head of a request to the end of its call.",
    CALL_LABELS,
    BUCKETS,
)
REQUESTS = CountFamily("tensorgate_requests", "Calls that have ended.", DURATION)
REQUEST_BYTES = CounterFamily(
    "tensorgate_request_body_bytes", "Bytes of bodies that clients have sent.", ("route",)
)
RESPONSE_BYTES = CounterFamily(
    "tensorgate_response_body_bytes", "Bytes of bodies that clients were sent.", ("route",)
)
SERVER_DURATION = HistogramFamily(
    "tensorgate_server_duration_seconds",
    "Time from the sending of a request to an endpoint to the end of its response.",
    ENDPOINT_LABELS,
    BUCKETS,
)
FIRST_BYTE = HistogramFamily(
    "tensorgate_server_first_byte_seconds",
    "Time from the sending of a request to an endpoint to the head of its response.",
    ENDPOINT_LABELS,
    BUCKETS,
)
SENT_BYTES = CounterFamily(
    "tensorgate_server_sent_body_bytes", "Bytes of bodies sent to an endpoint.", ENDPOINT_LABELS
)
RECEIVED_BYTES = CounterFamily(
    "tensorgate_server_received_body_bytes",
    "Bytes of bodies received from an endpoint.",
    ENDPOINT_LABELS,
)
RESPONSES = CounterFamily(
    "tensorgate_server_responses",
    "Responses of an endpoint that clients or mirrors got, by their status.",
    (*ENDPOINT_LABELS, "status"),
)
CALL_LATENCY = HistogramFamily(
    "call_latency",
    "DURATION by model alone, in buckets for percentiles.",
    ("model",),
    _FINE_BOUNDS,
    is_internal=True,
)
ROUTE_LATENCY = HistogramFamily(
    "route_latency",
    "DURATION by route alone, in buckets for percentiles.",
    ("route",),
    _FINE_BOUNDS,
    is_internal=True,
)
ENDPOINT_LATENCY = HistogramFamily(
    "endpoint_latency",
    "SERVER_DURATION of calls that succeed, in buckets for percentiles; by model for inference.",
    (*ENDPOINT_LABELS, "model"),
    _FINE_BOUNDS,
    is_internal=True,
)
RETRIES = CounterFamily(
    "tensorgate_retries", "Requests that were sent to another endpoint.", ("upstream",)
)
CONVERSIONS = CounterFamily(
    "tensorgate_conversions",
    "Infer requests by the form of the client and the form that the server got.",
    ("client_form", "server_form"),
)
ELEMENTS = CounterFamily(
    "tensorgate_converted_elements",
    "Elements of tensors that were converted between JSON and binary form.",
    ("direction",),
)
MODEL_ELEMENTS = CounterFamily(
    "tensorgate_model_converted_elements",
    "Elements of tensors that were converted in calls of a model.",
    ("model",),
)
MODEL_BYTES = CounterFamily(
    "tensorgate_model_converted_bytes",
    "Bytes of the bodies of converted calls of a model, on the side of clients and of servers.",
    ("model", "side"),
)
SHARED_MEMORY_CALLS = CounterFamily(
    "tensorgate_shared_memory_calls",
    "Inputs and outputs of large requests by their lane to an endpoint with shared memory, and why"
    " that is the socket: small, full, unavailable, unsuitable or forgotten.",
    (*ENDPOINT_LABELS, "tensors", "lane", "reason"),
)
ERRORS = CounterFamily(
    "tensorgate_errors",
    "Calls that the gateway refused, failed or aborted, by the kind of the error.",
    ("kind", "upstream"),
)

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
    "tensorgate_ejections", "Ejections of the endpoint because calls to it failed.", ENDPOINT_LABELS
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

FAMILIES: tuple[Family | CountFamily, ...] = (
    DURATION,
    REQUESTS,
    REQUEST_BYTES,
    RESPONSE_BYTES,
    SERVER_DURATION,
    FIRST_BYTE,
    SENT_BYTES,
    RECEIVED_BYTES,
    RESPONSES,
    CALL_LATENCY,
    ROUTE_LATENCY,
    ENDPOINT_LATENCY,
    RETRIES,
    CONVERSIONS,
    ELEMENTS,
    MODEL_ELEMENTS,
    MODEL_BYTES,
    SHARED_MEMORY_CALLS,
    ERRORS,
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
"""What the store of a gateway has; metrics are shown in this order."""
