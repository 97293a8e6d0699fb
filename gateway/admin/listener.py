"""The request handler of the admin address: serves pages, and lists them at ``/``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.proxy.interfaces import ClientRequest, ClientResponse

_METHODS = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Page:
    """A response to an operator."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Pages = Mapping[str, Callable[[ClientRequest], Awaitable[Page]]]
"""The functions that build the pages, by path."""


class Admin:
    """Handles requests for pages, and for nothing else."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def __call__(self, request: ClientRequest, response: ClientResponse) -> None:
        """Respond with a page; raise GatewayError 404 for other paths, 405 for other methods."""
        path = request.target.partition("?")[0]
        if path != "/" and path not in self._pages:
            listed = ", ".join(self._pages)
            raise GatewayError(ErrorKind.NOT_FOUND, f"no page {path[:80]!r}; there are: {listed}")
        if request.method not in _METHODS:
            message = f"{request.method} {path}: pages are read with GET"
            raise GatewayError(ErrorKind.NOT_ALLOWED, message)
        page = self._list() if path == "/" else await self._pages[path](request)
        headers = CIMultiDict({"Content-Type": page.content_type, "Cache-Control": "no-store"})
        await response.send(page.status, "", headers, page.body)

    def _list(self) -> Page:
        return Page("".join(f"{path}\n" for path in self._pages).encode())
