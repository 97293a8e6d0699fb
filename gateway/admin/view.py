"""What the operator's page shows of a gateway, as JSON documents: responses and events each second.

Each panel has a document: the state of now, and how it changed. Other programs may read them too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from aiohttp import web

from gateway.admin.history import History, Minute
from gateway.admin.own_calls import OwnCallError, call_for_document
from gateway.admin.panels.calls import describe_journal, matching_calls, parse_filter, parse_text
from gateway.admin.panels.models import FailedModels, Savings, describe_model, describe_models
from gateway.admin.panels.overview import describe_overview, find_problems
from gateway.admin.panels.topology import describe_topology, parse_choice
from gateway.admin.source import GatewaySource, Status
from gateway.admin.status import State, merge_statuses
from gateway.protocol.operations import model_path, quote_name

_CACHE_SECONDS = 0.9
"""For this long, all operators see the same state."""

Document = dict[str, Any]
T = TypeVar("T")


class GatewayView:
    """Describes a gateway for operators: a document for each panel of the page.

    It samples the metrics while its context is open.
    """

    def __init__(self, source: GatewaySource) -> None:
        self._source = source
        self.savings = Savings()
        """What operators have measured of conversion."""
        self._started_at = time.time()
        self._history = History(source.metric_store, source.requests_in_progress)
        self._state: State | None = None
        self._expires = float("-inf")
        self._lock = asyncio.Lock()
        self._models_lock = asyncio.Lock()
        self._failed_models = FailedModels()
        self._positions: Sequence[int] = ()
        """Behind the calls that are noted in the failed models."""

    async def __aenter__(self) -> GatewayView:
        self._task = asyncio.create_task(self._history.run(), name="admin history")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def minute(self) -> Minute | None:
        """Return what was counted in the last minute."""
        return self._history.minute

    def problems(self, status: Status) -> list[Document]:
        """Return what is wrong now, by a status of all workers."""
        return find_problems(status, self._history.now, self._source.settings)

    async def overview(self, _: Mapping[str, str]) -> Document:
        """Return what an operator looks at first, with the last five minutes."""
        state, settings = await self._current_state(), self._source.settings
        overview = await asyncio.to_thread(describe_overview, state, settings, self._started_at)
        return {**overview, "recent": self._history.recent()}

    async def history(self, _: Mapping[str, str]) -> Document:
        """Return the last hour."""
        return {"time": time.time(), "history": self._history.hour()}

    async def topology(self, query: Mapping[str, str]) -> Document:
        """Return the routes, the upstreams and their endpoints. Raises ValueError."""
        chosen = parse_choice(query)
        state, settings = await self._current_state(), self._source.settings
        return await asyncio.to_thread(describe_topology, state, self._history, settings, chosen)

    async def curves(self, query: Mapping[str, str]) -> Document:
        """Return the last hour of an endpoint, or of a route. Raises ValueError."""
        if route := parse_text(query, "route"):
            history = self._history.route_curves(route)
        else:
            upstream, url = parse_text(query, "upstream"), parse_text(query, "endpoint")
            if not upstream or not url:
                raise ValueError("route: a route is required, or an upstream and an endpoint")
            history = self._history.endpoint_curves(upstream, url)
        return {"time": time.time(), "history": history}

    async def models(self, query: Mapping[str, str]) -> Document:
        """Return the models that are ready or were called. Raises ValueError."""
        state = await self._current_state()

        def describe() -> Document:
            calls, self._positions = self._source.recent_calls(self._positions)
            self._failed_models.note(calls)
            return describe_models(state, query, self._failed_models.recent(state.time))

        async with self._models_lock:
            return await asyncio.to_thread(describe)

    async def model(self, query: Mapping[str, str]) -> Document:
        """Return one model, with what its servers say of it. Raises ValueError."""
        if not (name := query.get("name")):
            raise ValueError("name: the name of a model is required")
        state = await self._current_state()
        store, path = self._source.metric_store, model_path(quote_name(name))
        document, metadata, trace = await asyncio.gather(
            asyncio.to_thread(describe_model, state, store, self.savings, name),
            self._asked("metadata", path),
            self._asked("trace_settings", f"{path}/trace/setting"),
        )
        return document | metadata | trace

    async def _asked(self, name: str, path: str) -> Document:
        """Return a document of the gateway's servers, or why there is none."""
        try:
            found = await call_for_document(self._source, "GET", path)
            return {name: found, f"{name}_error": None}
        except OwnCallError as error:
            return {name: None, f"{name}_error": str(error)}

    async def journal(self, query: Mapping[str, str]) -> Document:
        """Return the last events that fit, newest first. Raises ValueError."""
        events = await asyncio.to_thread(self._source.events)
        return describe_journal(time.time(), events, query)

    async def calls(self, query: Mapping[str, str]) -> Document:
        """Return the recent calls that fit, newest first. Raises ValueError."""
        document, _ = await self.calls_since((), query)
        return document

    async def calls_since(
        self, positions: Sequence[int], query: Mapping[str, str]
    ) -> tuple[Document, list[int]]:
        """Return the calls after positions that fit, and the positions behind them."""
        fits, limit = parse_filter(query)

        def read() -> tuple[Document, list[int]]:
            encoded, behind = self._source.recent_calls(positions)
            calls = matching_calls(encoded, fits, limit)
            return {"time": time.time(), "kept": len(encoded), "calls": calls}, list(behind)

        return await asyncio.to_thread(read)

    async def _current_state(self) -> State:
        async with self._lock:
            if self._state is None or time.monotonic() >= self._expires:
                self._state = await run_to_end(self._next_state())
                self._expires = time.monotonic() + _CACHE_SECONDS
            return self._state

    async def _next_state(self) -> State:
        statuses = await self._source.worker_statuses()
        store, minute = self._source.metric_store, self._history.minute

        def merge() -> Status:
            return merge_statuses(statuses, store, minute, self._source.events())

        status = await asyncio.to_thread(merge)
        return State(time.time(), status, self._history.now, minute)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; a caller that is cancelled waits for its end, too.

    A thread runs on if nobody waits for it any more. So a lock around it would be free too early.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait([task])


MAX_STREAMS = 32
"""Streams at a time."""
INTERVAL = 1.0
SEND_TIMEOUT = 15.0
"""Seconds for a client to read an event; one that is slower is cut off and comes again."""
_RECONNECT_MS = 2000
_FOLLOWED_CALLS = "100"
"""Calls of a second that are sent at most."""
_DOCUMENTS = ("overview", "history", "curves", "topology", "models", "model", "calls", "journal")
_TOPICS = ("overview", "topology", "models", "calls", "journal")

_log = logging.getLogger("tensorgate.admin")

Describe = Callable[[], Awaitable[Document | None]]
"""Returns the document of a topic; None if there is nothing new in it."""


class Api:
    """The handlers of the documents; a query that cannot be read is a 400.

    Events are sent to pages until these leave, or the gateway stops.
    """

    def __init__(self, view: GatewayView) -> None:
        self._view = view
        self._stopping = asyncio.Event()
        self._streams = 0

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the documents and of the streams."""
        documents = [_get(f"/api/{name}", getattr(self._view, name)) for name in _DOCUMENTS]
        return [*documents, web.get("/api/events", self.stream, allow_head=False)]

    async def end(self, _: web.Application) -> None:
        """End all streams: the pages connect again when the gateway is back."""
        self._stopping.set()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send the topics of a query each second."""
        topics = list(dict.fromkeys(request.query.get("topics", "overview").split(",")))
        if unknown := [each for each in topics if each not in _TOPICS]:
            known = ", ".join(_TOPICS)
            raise web.HTTPBadRequest(text=f"topics: expected {known}, got {unknown[0][:100]!r}")
        if self._streams >= MAX_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"there are {MAX_STREAMS} event streams already")
        self._streams += 1
        try:
            return await self._stream(request, topics)
        finally:
            self._streams -= 1

    async def _stream(self, request: web.Request, topics: Sequence[str]) -> web.StreamResponse:
        try:
            describes = [(topic, self._describe(topic, request.query)) for topic in topics]
            first = [(topic, await describe()) for topic, describe in describes]
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.headers["X-Accel-Buffering"] = "no"  # a proxy between must not collect events
        await response.prepare(request)
        try:
            await self._send(response, f"retry: {_RECONNECT_MS}\n\n".encode())
            await self._send_events(response, describes, first)
        except ConnectionError:
            pass  # the page is gone
        except Exception as error:
            if not isinstance(error, TimeoutError):
                _log.exception("an event stream failed")
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _send_events(
        self,
        response: web.StreamResponse,
        describes: Sequence[tuple[str, Describe]],
        first: Sequence[tuple[str, Document | None]],
    ) -> None:
        documents = first
        while True:
            for topic, document in documents:
                if document is None:
                    await self._send(response, b": nothing new\n\n")  # tells whether it reads
                    continue
                data = b"event: %b\ndata: %b\n\n" % (topic.encode(), orjson.dumps(document))
                await self._send(response, data)
            try:
                async with asyncio.timeout(INTERVAL):
                    await self._stopping.wait()
            except TimeoutError:
                documents = [(topic, await describe()) for topic, describe in describes]
            else:
                await self._send(response, b"event: end\ndata: {}\n\n")
                return

    def _describe(self, topic: str, query: Mapping[str, str]) -> Describe:
        """Return what describes a topic; parameters of its own begin with its name and a dot."""
        view, prefix = self._view, f"{topic}."
        own = {
            name.removeprefix(prefix): value
            for name, value in query.items()
            if name.startswith(prefix)
        }
        if topic == "calls":
            return _new_calls(view, {"limit": _FOLLOWED_CALLS, **own})
        if topic == "journal":
            return _new_events(view, own)
        describe: Callable[[Mapping[str, str]], Awaitable[Document]] = getattr(view, topic)
        return lambda: describe(own)

    @staticmethod
    async def _send(response: web.StreamResponse, data: bytes) -> None:
        async with asyncio.timeout(SEND_TIMEOUT):
            await response.write(data)


def _new_calls(view: GatewayView, query: Mapping[str, str]) -> Describe:
    """Return what describes the calls since the last time; the first time, all."""
    positions: Sequence[int] = ()

    async def describe() -> Document | None:
        nonlocal positions
        document, positions = await view.calls_since(positions, query)
        return document if document["calls"] else None

    return describe


def _new_events(view: GatewayView, query: Mapping[str, str]) -> Describe:
    """Return what describes the events if they are others than the last time."""
    known: Sequence[Document] | None = None

    async def describe() -> Document | None:
        nonlocal known
        before, document = known, await view.journal(query)
        known = document["events"]
        return None if known == before else document

    return describe


def _get(path: str, describe: Callable[[Mapping[str, str]], Awaitable[Document]]) -> web.RouteDef:
    async def respond(request: web.Request) -> web.Response:
        try:
            document = await describe(request.query)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return web.Response(body=orjson.dumps(document), content_type="application/json")

    return web.get(path, respond)
