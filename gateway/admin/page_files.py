"""The files of the operator's page: HTML, CSS and JavaScript modules."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from aiohttp import web

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    etag: str


class PageFiles:
    """Serves the files of the folder ``page``, each of which is read once.

    A browser asks each time whether a file has changed, so a new version of the gateway is seen at
    once.
    """

    def __init__(self) -> None:
        self._files = {
            each.name: _read(each.read_bytes(), each.name.rpartition(".")[2])
            for each in (files(__package__) / "page").iterdir()
            if each.name.rpartition(".")[2] in _TYPES
        }

    def routes(self) -> list[web.RouteDef]:
        """Return the route of the files beside the index."""
        return [web.get("/page/{name}", self.file)]

    async def index(self, request: web.Request) -> web.Response:
        """Respond with the page."""
        return self._respond(request, self._files[_INDEX])

    async def file(self, request: web.Request) -> web.Response:
        """Respond with a file; raises HTTPNotFound."""
        found = self._files.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound(text=f"no file {request.match_info['name'][:80]!r}")
        return self._respond(request, found)

    @staticmethod
    def _respond(request: web.Request, file: _File) -> web.Response:
        headers = {"Cache-Control": "no-cache", "ETag": f'"{file.etag}"', "Vary": "Accept"}
        if any(each.value == file.etag for each in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=file.body, content_type=file.content_type, charset="utf-8", headers=headers
        )


def _read(body: bytes, suffix: str) -> _File:
    return _File(body, _TYPES[suffix], hashlib.sha256(body).hexdigest()[:32])
