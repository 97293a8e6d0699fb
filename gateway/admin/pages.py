"""The pages of the admin address: liveness, readiness, status, metrics."""

from __future__ import annotations

import asyncio

import orjson
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from gateway.admin.listener import Page, Pages
from gateway.admin.status import ObservedGateway, status
from gateway.observe.metrics import render_metrics
from gateway.proxy.dispatch import error_body

_JSON = "application/json"


def pages(gateway: ObservedGateway) -> Pages:
    """Build the pages of a gateway.

    - ``/live`` is 200 while the process runs.
    - ``/ready`` is 200 while all required upstreams can be used, else 503. It is 503 while the
      gateway drains.
    - ``/status`` is JSON, and ``/metrics`` is Prometheus' text format.
    """

    async def live() -> Page:
        return Page(b'{"live":true}\n', _JSON)

    async def ready() -> Page:
        reason = await gateway.not_ready_reason()
        return _not_ready(reason) if reason else Page(b'{"ready":true}\n', _JSON)

    async def shown_status() -> Page:
        body = orjson.dumps(status(gateway), option=orjson.OPT_INDENT_2)
        return Page(body + b"\n", _JSON)

    async def metrics() -> Page:
        # In a thread: with many series it takes longer than a time slice.
        text = await asyncio.to_thread(render_metrics, status(gateway), gateway.metric_store)
        return Page(text, CONTENT_TYPE_PLAIN_0_0_4)

    return {"/live": live, "/ready": ready, "/status": shown_status, "/metrics": metrics}


def _not_ready(reason: str) -> Page:
    return Page(error_body(f"not ready: {reason}") + b"\n", _JSON, 503)
