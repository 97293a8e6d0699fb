"""Refuses heads that servers of a dialect do not accept."""

from __future__ import annotations

from gateway.errors import bad_request
from gateway.protocol.dialects import Dialect
from gateway.upstream.transport import UpstreamRequest


def check_lengths(request: UpstreamRequest, dialect: Dialect | None) -> None:
    """Refuse a head that the server would close the connection for, as if it had failed.

    Raises GatewayError (400) that names the part that is too long.
    """
    longest = None if dialect is None else dialect.max_head_part
    headers = request.headers
    if longest is None or max(map(len, (request.target, *headers, *headers.values()))) <= longest:
        return
    parts = {"the path and query": len(request.target)}
    parts |= {"the name of a header": max(map(len, headers), default=0)}
    parts |= {f"header {name}": len(value) for name, value in headers.items()}
    what, size = next((what, size) for what, size in parts.items() if size > longest)
    raise bad_request(f"{what} has {size} bytes; the server takes at most {longest}")
