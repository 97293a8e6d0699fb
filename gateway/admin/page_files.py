"""The files of the operator's page: HTML, CSS and JavaScript modules."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from aiohttp import web

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}


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
