"""The curves of endpoints and routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.admin.history import History
from gateway.admin.panels.query import parse_text


def describe_curves(history: History, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the last hour of an endpoint, or of a route. Raises ValueError."""
    if route := parse_text(query, "route"):
        return history.route_curves(route)
    upstream, url = parse_text(query, "upstream"), parse_text(query, "endpoint")
    if not upstream or not url:
        raise ValueError("route: a route is required, or an upstream and an endpoint")
    return history.endpoint_curves(upstream, url)
