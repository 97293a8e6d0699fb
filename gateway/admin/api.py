"""The JSON documents of the admin address, for the page and other programs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from gateway.admin.view import Document, GatewayView


class Api:
    """The handlers of the documents; a query that cannot be read is a 400."""

    def __init__(self, view: GatewayView) -> None:
        self._view = view

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the documents."""
        view = self._view
        return [
            _get("/api/overview", lambda _: view.overview()),
            _get("/api/history", lambda _: view.history()),
            _get("/api/curves", lambda request: view.curves(request.query)),
            _get("/api/topology", lambda request: view.topology(request.query)),
            _get("/api/models", lambda request: view.models(request.query)),
            _get("/api/model", lambda request: view.model(_name(request))),
            _get("/api/calls", lambda request: view.calls(request.query)),
            _get("/api/journal", lambda request: view.journal(request.query)),
        ]


def _get(path: str, describe: Callable[[web.Request], Awaitable[Document]]) -> web.RouteDef:
    async def respond(request: web.Request) -> web.Response:
        try:
            document = await describe(request)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return web.Response(body=orjson.dumps(document), content_type="application/json")

    return web.get(path, respond)


def _name(request: web.Request) -> str:
    name = request.query.get("name")
    if not name:
        raise ValueError("name: the name of a model is required")
    return name
