"""The application of the admin address: its paths, its errors, and what protects it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Self

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.admin import security
from gateway.admin.actions import Actions
from gateway.admin.pages import PageFiles, Pages, error_response
from gateway.admin.server import AdminServer
from gateway.admin.source import GatewaySource
from gateway.admin.try_it.handler import TryIt
from gateway.admin.view import Api, GatewayView
from gateway.errors import INTERNAL_ERROR_TEXT

_DEFAULT_NOT_FOUND = f"404: {web.HTTPNotFound().reason}"
_VARY = {"Vary": "Accept"}

_log = logging.getLogger("tensorgate.admin")


class AdminSite(AdminServer):
    """Serves the pages of ``source``, and samples its metrics, while its context is open."""

    def __init__(self, source: GatewaySource) -> None:
        self._view = GatewayView(source)
        super().__init__(build_application(source, self._view))

    async def __aenter__(self) -> Self:
        """Start to sample and to serve."""
        await super().__aenter__()
        await self._view.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float = 0.0) -> None:
        """Go on for ``grace`` seconds, and close all connections: see ``drain``."""
        await self.drain(grace)
        await self._view.__aexit__()


def build_application(source: GatewaySource, view: GatewayView) -> web.Application:
    """Build the application of a gateway; ``view`` is what its page shows."""
    pages = Pages(source, view)
    files, api = PageFiles(), Api(view)
    paths = [route.path for route in pages.routes()]

    async def root(request: web.Request) -> web.StreamResponse:
        """Respond with the page for a browser, and else with the list of the pages for tools."""
        if "text/html" in request.headers.get("Accept", ""):
            return await files.file(request)
        return web.Response(text="".join(f"{path}\n" for path in paths), headers=_VARY)

    application = web.Application(middlewares=[_describe_errors(paths), _protect(source)])
    application.add_routes([web.get("/", root), *pages.routes(), *files.routes()])
    application.add_routes(api.routes())
    application.add_routes(Actions(source).routes())
    application.add_routes(TryIt(source, view.savings).routes())
    application.on_response_prepare.append(_add_headers)
    application.on_shutdown.append(api.end)
    return application


def _protect(source: GatewaySource) -> Middleware:
    @web.middleware
    async def protect(request: web.Request, handler: Handler) -> web.StreamResponse:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        reason = security.refusal(request.path, host, origin, source.settings.admin.hosts)
        return error_response(403, reason) if reason else await handler(request)

    return protect


def _describe_errors(paths: Sequence[str]) -> Middleware:
    @web.middleware
    async def describe_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            if "GET" in error.allowed_methods:
                reason = "pages are read with GET"
            else:
                reason = "actions are made with POST"
            return error_response(405, f"{request.method} {request.path}: {reason}")
        except web.HTTPException as error:
            if error.status == 404 and error.text == _DEFAULT_NOT_FOUND:
                path = request.path[:80]
                return error_response(404, f"no page {path!r}; there are: {', '.join(paths)}")
            return error_response(error.status, error.text or error.reason)
        except ConnectionError:
            raise  # the client is gone
        except web.RequestPayloadError:
            return error_response(400, "the body cannot be read")
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            return error_response(500, INTERNAL_ERROR_TEXT)

    return describe_errors


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Add headers to a response that is about to be sent, of whatever kind."""
    response.headers.update(security.HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
