"""The curves of endpoints and routes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.admin.history import CLIENT_ERROR_STATUS, ENDPOINT_POINTS, History, Window, rounded
from gateway.admin.panels.query import parse_text
from gateway.observe.call_metrics import DURATION
from gateway.observe.metric_store import clean_label

_ROUTE, _STATUS = map(DURATION.labels.index, ("route", "status"))

Route = dict[str, Any]


def describe_curves(history: History, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the last hour of an endpoint, or of a route. Raises ValueError."""
    if route := parse_text(query, "route"):
        return history.route_curves(route)
    upstream, url = parse_text(query, "upstream"), parse_text(query, "endpoint")
    if not upstream or not url:
        raise ValueError("route: a route is required, or an upstream and an endpoint")
    return history.endpoint_curves(upstream, url)


def add_curves(routes: Iterable[Route], window: Window | None, history: History) -> None:
    """Add to each route its last five minutes, and its share of 4xx."""
    totals, refused = _calls_by_route(window)
    for route in routes:
        name = clean_label(route["name"])
        ratio = refused[name] / totals[name] if totals[name] else None
        route["client_error_ratio"] = None if ratio is None else rounded(ratio)
        route["recent"] = history.route_curves(name, ENDPOINT_POINTS)


def _calls_by_route(window: Window | None) -> tuple[dict[str, float], dict[str, float]]:
    """Return the calls per second of each route: all, and those that were refused with 4xx."""
    totals: defaultdict[str, float] = defaultdict(float)
    refused: defaultdict[str, float] = defaultdict(float)
    if window is not None:
        for labels, rate in zip(window.labels(DURATION), window.calls().tolist(), strict=False):
            totals[labels[_ROUTE]] += rate
            if labels[_STATUS] == CLIENT_ERROR_STATUS:
                refused[labels[_ROUTE]] += rate
    return totals, refused
