"""Says who may do what at the admin address, and reads what they send.

It protects the address from web pages of others that an operator's browser shows:

- DNS rebinding: a page of another host may have its own name lead to this address. Its requests
  have that name in Host. So a name must be ``localhost`` or one of ``admin.hosts``; an address is
  not a name.
- Requests of other origins: a browser says where a request with effects comes from (Origin).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import BaseModel, ValidationError

from gateway.admin.source import GatewaySource
from gateway.settings.values.wording import format_path

WRONG_KEY_DELAY = 0.5
"""Seconds until a wrong key is refused, so that keys cannot be guessed fast."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""The headers of all responses."""

_GUARDED = ("/api/", "/status", "/metrics")
"""What tells of the gateway or changes it. Probes may use any name for /live and /ready."""


Body = TypeVar("Body", bound=BaseModel)


def refusal(path: str, host: str, origin: str | None, hosts: Collection[str]) -> str:
    """Return why a request must not be served; empty if it may be.

    ``host`` and ``origin`` are the headers, and ``hosts`` are further names of this address.
    """
    if not path.startswith(_GUARDED):
        return ""
    name = _host_name(host)
    if not _is_own_name(name, hosts):
        return (
            f"the host name {name[:100]!r} is not known here: use localhost or the IP address, or"
            " add it to admin.hosts, also for Prometheus"
        )
    if origin is not None and not _is_own_origin(origin, host, hosts):
        return f"a request from the origin {origin[:100]!r} is refused"
    return ""


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port and the brackets of IPv6."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return host


def _is_own_name(name: str, hosts: Collection[str]) -> bool:
    if not name or name == "localhost" or name.endswith(".localhost") or name in hosts:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_own_origin(origin: str, host: str, hosts: Collection[str]) -> bool:
    try:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https"):
            return False
        return parts.netloc.lower() == host.lower() or parts.hostname in hosts
    except ValueError:
        return False


async def authorize(source: GatewaySource, request: web.Request, obstacle: str) -> None:
    """Check that a request has a key, and that the settings are no ``obstacle``.

    Raises HTTPForbidden and HTTPUnauthorized.
    """
    if obstacle:
        raise web.HTTPForbidden(text=obstacle)
    if not source.authorizes(request.headers):
        await asyncio.sleep(WRONG_KEY_DELAY)
        raise web.HTTPUnauthorized(text="an API key of the group in admin.keys is needed")


async def read_body(request: web.Request, model: type[Body], max_size: int) -> Body:
    """Return the JSON object that is a request's body. Raises HTTPException (4xx)."""
    # A page of another origin could send another type without asking (CORS).
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="expected Content-Type: application/json")
    text = bytearray()
    async for piece in request.content.iter_any():
        text += piece
        if len(text) > max_size:
            raise web.HTTPRequestEntityTooLarge(max_size, len(text))
    try:
        return await asyncio.to_thread(model.model_validate_json, bytes(text), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = format_path(first["loc"]) or "the body"
        reason = first["msg"].removeprefix("Value error, ")
        raise web.HTTPBadRequest(text=f"{where}: {reason}") from None
