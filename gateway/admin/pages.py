"""The pages of the admin address: liveness, readiness, status, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import orjson

from gateway.admin.listener import Page, Pages
from gateway.admin.status import ObservedGateway, Status, merge_statuses, process_numbers
from gateway.observe.metric_store import MetricStore
from gateway.observe.metrics import render_metrics
from gateway.proxy.dispatch import error_body
from gateway.proxy.interfaces import ClientRequest

_JSON = "application/json"


def pages(gateway: ObservedGateway) -> Pages:
    """Build the pages of a gateway.

    - ``/live`` is 200 while the process runs.
    - ``/ready`` is 200 while all required upstreams can be used, else 503. It is 503 while the
      gateway drains.
    - ``/status`` is JSON. ``/metrics`` is Prometheus' text format, or OpenMetrics on request.

    Both show all workers as one.
    """
    store = gateway.metric_store

    async def live(_: ClientRequest) -> Page:
        return Page(b'{"live":true}\n', _JSON)

    async def ready(_: ClientRequest) -> Page:
        reason = await gateway.not_ready_reason()
        return _not_ready(reason) if reason else Page(b'{"ready":true}\n', _JSON)

    # In threads: with many series or endpoints they take longer than a time slice.
    async def status(_: ClientRequest) -> Page:
        return await asyncio.to_thread(_status_page, await gateway.worker_statuses(), store)

    async def metrics(request: ClientRequest) -> Page:
        accept = ",".join(request.headers.getall("Accept", ()))
        statuses = await gateway.worker_statuses()
        return await asyncio.to_thread(_metrics_page, statuses, store, accept)

    return {"/live": live, "/ready": ready, "/status": status, "/metrics": metrics}


def _status_page(statuses: Sequence[Status], store: MetricStore) -> Page:
    body = orjson.dumps(_merged(statuses, store), option=orjson.OPT_INDENT_2)
    return Page(body + b"\n", _JSON)


def _metrics_page(statuses: Sequence[Status], store: MetricStore, accept: str) -> Page:
    exemplars = [exemplar for each in statuses for exemplar in each["exemplars"]]
    return Page(*render_metrics(_merged(statuses, store), store, exemplars, accept))


def _merged(statuses: Sequence[Status], store: MetricStore) -> Status:
    complete = [{**each, "process": process_numbers(each["pid"])} for each in statuses]
    return merge_statuses(complete, store)


def _not_ready(reason: str) -> Page:
    return Page(error_body(f"not ready: {reason}") + b"\n", _JSON, 503)
