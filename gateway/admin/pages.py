"""The pages for probes and tools, and the files of the operator's page: HTML, CSS, JavaScript."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files

import orjson
from aiohttp import web

from gateway.admin.history import Minute
from gateway.admin.source import GatewaySource, Status
from gateway.admin.status import merge_statuses, process_numbers
from gateway.admin.view import GatewayView
from gateway.errors import replace_surrogates
from gateway.observe.metric_store import MetricStore
from gateway.observe.metrics import render_metrics

_JSON = "application/json"

_MAX_WAITING_PAGES = 4
"""Pages of different forms that wait for their turn; further ones are in the plain text format."""

_Render = Callable[[Sequence[Status], MetricStore, Minute | None], tuple[bytes, str]]


class Pages:
    """The handlers of the pages of a gateway. Each shows all workers as one.

    - ``/live`` is 200 while the gateway runs, and 503 if all workers hang.
    - ``/ready`` is 200 while all required upstreams can be used, else 503. It is 503 while the
      gateway drains.
    - ``/status`` is JSON. ``/metrics`` is Prometheus' text format, or OpenMetrics on request.

    ``view`` knows what was counted in the last minute, and what is wrong by a status.
    """

    def __init__(self, source: GatewaySource, view: GatewayView) -> None:
        self._source = source
        self._view = view
        # Many at once would hold the statuses of all workers as often, and delay the event loop.
        self._rendering = asyncio.Lock()
        self._next: dict[str, asyncio.Task[tuple[bytes, str]]] = {}
        """The pages that wait for their turn: all who want the same page meanwhile share it."""

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the pages."""
        return [
            web.get("/live", self.live),
            web.get("/ready", self.ready),
            web.get("/status", self.status),
            web.get("/metrics", self.metrics),
        ]

    async def live(self, _: web.Request) -> web.Response:
        """Respond that the process runs, or that all workers hang."""
        if self._source.hangs:
            return error_response(503, "no worker responds")
        return web.Response(body=b'{"live":true}\n', content_type=_JSON)

    async def ready(self, _: web.Request) -> web.Response:
        """Respond whether the gateway is ready, or why it is not."""
        if reason := await self._source.not_ready_reason():
            return error_response(503, f"not ready: {reason}")
        return web.Response(body=b'{"ready":true}\n', content_type=_JSON)

    # In threads: with many series or endpoints they take longer than a time slice.
    async def status(self, _: web.Request) -> web.Response:
        """Respond with the status of all workers."""
        body, content_type = await self._share("status", self._encode_status)
        return web.Response(body=body, content_type=content_type)

    async def metrics(self, request: web.Request) -> web.Response:
        """Respond with the metrics of all workers."""
        accept = ",".join(request.headers.getall("Accept", ()))
        if len(self._next) >= _MAX_WAITING_PAGES and f"metrics {accept}" not in self._next:
            accept = ""
        page = await self._share(f"metrics {accept}", partial(_render_metrics, accept=accept))
        body, content_type = page
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _share(self, name: str, render: _Render) -> tuple[bytes, str]:
        if name not in self._next:
            self._next[name] = asyncio.create_task(self._render(name, render))
        return await asyncio.shield(self._next[name])

    async def _render(self, name: str, render: _Render) -> tuple[bytes, str]:
        async with self._rendering:
            del self._next[name]  # who asks from now on gets the numbers of later
            statuses = await self._source.worker_statuses()
            store, minute = self._source.metric_store, self._view.minute
            return await asyncio.to_thread(render, statuses, store, minute)

    def _encode_status(
        self, statuses: Sequence[Status], store: MetricStore, minute: Minute | None
    ) -> tuple[bytes, str]:
        merged = dict(_merged(statuses, store, minute, self._source.events()))
        merged["problems"] = self._view.problems(merged)
        return orjson.dumps(merged, option=orjson.OPT_INDENT_2) + b"\n", _JSON


def error_response(status: int, message: str) -> web.Response:
    """Make the response of an error, as the protocol has it."""
    body = orjson.dumps({"error": replace_surrogates(message)}) + b"\n"
    return web.Response(status=status, body=body, content_type=_JSON)


def _render_metrics(
    statuses: Sequence[Status], store: MetricStore, minute: Minute | None, accept: str
) -> tuple[bytes, str]:
    exemplars = [exemplar for each in statuses for exemplar in each["exemplars"]]
    return render_metrics(_merged(statuses, store, minute), store, exemplars, accept)


def _merged(
    statuses: Sequence[Status],
    store: MetricStore,
    minute: Minute | None,
    events: Sequence[Status] = (),
) -> Status:
    complete = [{**each, "process": process_numbers(each["pid"])} for each in statuses]
    return merge_statuses(complete, store, minute, events)


_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class PageFiles:
    """Serves the files of the folder ``page``, each of which is read once.

    A browser asks each time whether a file has changed, so a new version of the gateway is seen at
    once.
    """

    def __init__(self) -> None:
        self._files = {
            each.name: each.read_bytes()
            for each in (files(__package__) / "page").iterdir()
            if each.name.rpartition(".")[2] in _TYPES
        }

    def routes(self) -> list[web.RouteDef]:
        """Return the route of the files beside the index."""
        return [web.get("/page/{name}", self.file)]

    async def file(self, request: web.Request) -> web.Response:
        """Respond with a file; without a name, with the page. Raises HTTPNotFound."""
        name = request.match_info.get("name", "index.html")
        if (body := self._files.get(name)) is None:
            raise web.HTTPNotFound(text=f"no file {name[:80]!r}")
        etag = hashlib.sha256(body).hexdigest()[:32]
        headers = {"Cache-Control": "no-cache", "ETag": f'"{etag}"', "Vary": "Accept"}
        if any(each.value == etag for each in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        content_type = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)
