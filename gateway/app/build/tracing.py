"""Settings → the sampling and the export of traces."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gateway import __version__
from gateway.observe.gateway_metrics import GatewayMetrics, TraceMetrics
from gateway.observe.tracing.exporter import TraceExporter, instance_name
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.settings.schema import Settings
from gateway.settings.sections import Tracing as TracingSettings

if TYPE_CHECKING:
    from gateway.observe.tracing.otlp import Sender
    from gateway.observe.tracing.spans import SpanWriter


class Tracing(NamedTuple):
    """What decides which calls are traced, and what exports their spans."""

    declared: TracingSettings
    sampler: TraceSampler
    exporter: TraceExporter


def build_tracing(
    settings: Settings, metrics: GatewayMetrics, before: Tracing | None = None
) -> Tracing | None:
    """Build what the settings say; None where tracing is off.

    The exporter is that from ``before`` if its settings are the same.
    """
    declared = settings.tracing
    if declared is None:
        return None
    if before is not None and _without_sample(before.declared) == _without_sample(declared):
        exporter = before.exporter
    else:
        exporter = TraceExporter(
            declared.endpoint, partial(_open_parts, declared), TraceMetrics(metrics.writer)
        )
    sampler = TraceSampler(declared.sample / 100, exporter.observe)
    return Tracing(declared, sampler, exporter)


def _without_sample(declared: TracingSettings) -> TracingSettings:
    return declared.model_copy(update={"sample": 0.0})


def _open_parts(declared: TracingSettings) -> tuple[SpanWriter, Sender]:
    """Return what writes spans and what sends them; their packages take a while to load."""
    from gateway.observe.tracing.otlp import Receiver, make_sender
    from gateway.observe.tracing.spans import SpanWriter

    receiver = Receiver(declared.endpoint, declared.protocol, declared.headers, declared.ca)
    writer = SpanWriter(declared.service_name, __version__, instance_name())
    return writer, make_sender(receiver)
