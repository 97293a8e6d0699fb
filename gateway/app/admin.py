"""The pages that operators read, and what writes them."""

from __future__ import annotations

import orjson
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from gateway.app.status import Observed, status
from gateway.listener.admin import Page, Pages
from gateway.observe.metrics import exposition

_JSON = "application/json"


def pages(gateway: Observed) -> Pages:
    """Make the pages of a gateway.

    ``/live`` is 200 while it runs; so is ``/ready``, if its required upstreams can be used and it
    does not drain, else it is 503. ``/status`` is JSON, ``/metrics`` Prometheus' text format.
    """

    async def live() -> Page:
        return Page(b"live\n")

    async def ready() -> Page:
        if gateway.listener.draining:
            return _not_ready("it drains")
        missing = await gateway.runtime.routes.readiness.missing()
        return _not_ready(missing) if missing else Page(b"ready\n")

    async def shown_status() -> Page:
        body = orjson.dumps(status(gateway), option=orjson.OPT_INDENT_2)
        return Page(body + b"\n", _JSON)

    async def metrics() -> Page:
        return Page(exposition(status(gateway)), CONTENT_TYPE_PLAIN_0_0_4)

    return {"/live": live, "/ready": ready, "/status": shown_status, "/metrics": metrics}


def _not_ready(why: str) -> Page:
    return Page(f"not ready: {why}\n".encode(), status=503)
