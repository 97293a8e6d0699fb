"""What operators can do at the admin address: drain endpoints, and change trace settings.

An action needs ``admin.actions: true`` and a key of ``admin.keys``. Each one is logged.
"""

from __future__ import annotations

import json
import logging

import orjson
from aiohttp import web
from pydantic import BaseModel, Field

from gateway.admin.own_calls import OwnCallError, call_for_document
from gateway.admin.security import authorize, read_body
from gateway.admin.source import GatewaySource
from gateway.admin.view import run_to_end
from gateway.errors import escape_for_log
from gateway.protocol.operations import model_path, quote_name

_MAX_BODY = 64 * 1024

_log = logging.getLogger("tensorgate.admin")

_TraceValue = str | int | float | None


class _Endpoint(BaseModel):
    upstream: str
    endpoint: str


class _TraceSettings(BaseModel):
    name: str = Field(min_length=1)
    settings: dict[str, _TraceValue | list[_TraceValue]]
    """Null resets a setting."""


class Actions:
    """The handlers of the actions: the request and the response are JSON."""

    def __init__(self, source: GatewaySource) -> None:
        self._source = source

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the actions."""
        return [
            web.post("/api/endpoints/drain", self.drain),
            web.post("/api/endpoints/restore", self.restore),
            web.post("/api/model/trace", self.set_trace),
        ]

    async def drain(self, request: web.Request) -> web.Response:
        """Give no new calls to an endpoint; those in progress finish."""
        return await self._change_endpoint(request, drained=True)

    async def restore(self, request: web.Request) -> web.Response:
        """Give calls to an endpoint again."""
        return await self._change_endpoint(request, drained=False)

    async def set_trace(self, request: web.Request) -> web.Response:
        """Change the trace settings of a model at its servers; respond with those in use."""
        await self._authorize(request)
        wanted = await read_body(request, _TraceSettings, _MAX_BODY)
        # An operator who leaves does not undo it, so the log must tell of it.
        return await run_to_end(self._set_trace(request.remote, wanted))

    async def _set_trace(self, operator: str | None, wanted: _TraceSettings) -> web.Response:
        path = f"{model_path(quote_name(wanted.name))}/trace/setting"
        try:
            in_use = await call_for_document(self._source, "POST", path, wanted.settings)
        except OwnCallError as error:
            raise web.HTTPBadGateway(text=str(error)) from None
        text = escape_for_log(f"{wanted.name}: {json.dumps(wanted.settings)}")
        _log.warning("operator at %s changed the trace settings of %s", operator, text)
        return _respond({"ok": True, "trace_settings": in_use})

    async def _change_endpoint(self, request: web.Request, drained: bool) -> web.Response:
        await self._authorize(request)
        wanted = await read_body(request, _Endpoint, _MAX_BODY)
        upstream, url = wanted.upstream, wanted.endpoint
        if drained and not await self._is_known(upstream, url):
            raise web.HTTPNotFound(text=f"{upstream} has no endpoint {url}")
        try:
            operator = f"operator at {request.remote}"
            await self._source.drain_endpoint(upstream, url, drained, operator)
        except ValueError as error:
            raise web.HTTPConflict(text=str(error)) from None
        verb = "drained" if drained else "restored"
        where = escape_for_log(f"{url} of {upstream}")
        _log.warning("operator at %s %s %s", request.remote, verb, where)
        return _respond({"ok": True})

    async def _is_known(self, upstream: str, url: str) -> bool:
        statuses = await self._source.worker_statuses()
        found = [each["upstreams"].get(upstream, {"endpoints": ()}) for each in statuses]
        return any(each["url"] == url for one in found for each in one["endpoints"])

    async def _authorize(self, request: web.Request) -> None:
        allowed = self._source.settings.admin.actions
        obstacle = "" if allowed else "actions are not allowed here (admin.actions)"
        await authorize(self._source, request, obstacle)


def _respond(document: object) -> web.Response:
    return web.Response(body=orjson.dumps(document), content_type="application/json")
