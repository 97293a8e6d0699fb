"""Checks that an operator may do what a request of the admin address asks for."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from gateway.admin.source import GatewaySource

_WRONG_KEY_DELAY = 0.5
"""Seconds until a wrong key is refused, so that keys cannot be guessed fast."""


class Authorization:
    """Checks keys."""

    def __init__(self, source: GatewaySource) -> None:
        self._source = source

    async def check(self, request: web.Request, obstacle: str) -> None:
        """Check that a request has a key, and that the settings are no ``obstacle``.

        Raises HTTPForbidden and HTTPUnauthorized.
        """
        if obstacle:
            raise web.HTTPForbidden(text=obstacle)
        if not self._source.authorizes(request.headers):
            await asyncio.sleep(_WRONG_KEY_DELAY)
            raise web.HTTPUnauthorized(text="an API key of the group in admin.keys is needed")


async def read_object(request: web.Request, max_size: int) -> dict[str, Any]:
    """Return the JSON object that is a request's body. Raises HTTPException (4xx)."""
    # A page of another origin could send another type without asking (CORS).
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="expected Content-Type: application/json")
    text = await _read(request, max_size)
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise web.HTTPBadRequest(text="the body is not JSON") from None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="expected an object")
    return body


async def _read(request: web.Request, max_size: int) -> bytes:
    text = bytearray()
    async for piece in request.content.iter_any():
        text += piece
        if len(text) > max_size:
            raise web.HTTPRequestEntityTooLarge(max_size, len(text))
    return bytes(text)
