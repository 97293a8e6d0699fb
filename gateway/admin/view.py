"""What the operator's page shows of a gateway: the state of now, and how it changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gateway.admin.history import History, Window
from gateway.admin.own_calls import OwnCallError, call_for_document
from gateway.admin.pages import run_to_end
from gateway.admin.panels.calls import CallFilter, describe_journal, matching_calls
from gateway.admin.panels.models import FailedModels, Savings, describe_model, describe_models
from gateway.admin.panels.overview import describe_overview, find_problems
from gateway.admin.panels.query import parse_text
from gateway.admin.panels.topology import EndpointFilter, describe_topology
from gateway.admin.source import GatewaySource, Status
from gateway.admin.status import State, merge_statuses
from gateway.protocol.operations import model_path, quote_name

_CACHE_SECONDS = 0.9
"""For this long, all operators see the same state."""

Document = dict[str, Any]
_NOTHING: Mapping[str, str] = MappingProxyType({})
"""The query of a document that takes none."""


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
    def minute(self) -> Window | None:
        """Return what was counted in the last minute."""
        return self._history.minute

    def problems(self, status: Status) -> list[Document]:
        """Return what is wrong now, by a status of all workers."""
        return find_problems(status, self._history.now, self._source.settings)

    async def overview(self, _: Mapping[str, str] = _NOTHING) -> Document:
        """Return what an operator looks at first, with the last five minutes."""
        state, settings = await self._current_state(), self._source.settings
        overview = await asyncio.to_thread(describe_overview, state, settings, self._started_at)
        return {**overview, "recent": self._history.recent()}

    async def history(self, _: Mapping[str, str] = _NOTHING) -> Document:
        """Return the last hour."""
        return {"time": time.time(), "history": self._history.hour()}

    async def topology(self, query: Mapping[str, str]) -> Document:
        """Return the routes, the upstreams and their endpoints. Raises ValueError."""
        chosen = EndpointFilter.parse(query)
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
        chosen = CallFilter.parse(query)
        return await asyncio.to_thread(self._calls_since, positions, chosen)

    def _calls_since(
        self, positions: Sequence[int], chosen: CallFilter
    ) -> tuple[Document, list[int]]:
        encoded, positions = self._source.recent_calls(positions)
        calls = matching_calls(encoded, chosen)
        return {"time": time.time(), "kept": len(encoded), "calls": calls}, list(positions)

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
