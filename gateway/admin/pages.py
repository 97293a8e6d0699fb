"""The pages that operators read, and what writes them."""

from __future__ import annotations

import orjson
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from gateway.admin.listener import Page, Pages
from gateway.admin.status import ObservedGateway, status
from gateway.observe.metrics import exposition
from gateway.proxy.dispatch import error_body

_JSON = "application/json"


def pages(gateway: ObservedGateway) -> Pages:
    """Make the pages of a gateway.

    ``/live`` is 200 while it runs; so is ``/ready``, if its required upstreams can be used and it
    does not drain, else it is 503. These and ``/status`` are JSON, ``/metrics`` is Prometheus' text
    format. While it drains, all pages but ``/ready`` go on as before.
    """

    async def live() -> Page:
        return Page(b'{"live":true}\n', _JSON)

    async def ready() -> Page:
        missing = await gateway.runtime.routes.readiness.check()
        return _not_ready(missing) if missing else Page(b'{"ready":true}\n', _JSON)

    async def shown_status() -> Page:
        body = orjson.dumps(status(gateway), option=orjson.OPT_INDENT_2)
        return Page(body + b"\n", _JSON)

    async def metrics() -> Page:
        return Page(exposition(status(gateway)), CONTENT_TYPE_PLAIN_0_0_4)

    return {"/live": live, "/ready": ready, "/status": shown_status, "/metrics": metrics}


def _not_ready(why: str) -> Page:
    return Page(error_body(f"not ready: {why}") + b"\n", _JSON, 503)
