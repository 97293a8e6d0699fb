"""What the gateway tells operators of itself, on an address of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.proxy.interfaces import ClientRequest, ClientResponse

_READ = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to an operator."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Pages = Mapping[str, Callable[[], Awaitable[Page]]]
"""What writes each page, by its path."""


class Admin:
    """Answers requests for pages, and for nothing else."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def __call__(self, request: ClientRequest, answer: ClientResponse) -> None:
        """Answer a request; raises GatewayError: 404 for what is no page, 405 for another method.

        ``/`` lists the pages.
        """
        path = request.target.partition("?")[0]
        if path != "/" and path not in self._pages:
            listed = ", ".join(self._pages)
            raise GatewayError(ErrorKind.NOT_FOUND, f"no page {path[:80]!r}; there are: {listed}")
        if request.method not in _READ:
            message = f"{request.method} {path}: pages are read with GET"
            raise GatewayError(ErrorKind.NOT_ALLOWED, message)
        page = self._list() if path == "/" else await self._pages[path]()
        headers = CIMultiDict({"Content-Type": page.content_type, "Cache-Control": "no-store"})
        await answer.send(page.status, "", headers, page.body)

    def _list(self) -> Page:
        return Page("".join(f"{path}\n" for path in self._pages).encode())
