"""The curves of endpoints and routes, and what flows from routes: refused calls, mirror copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.admin.history import CLIENT_ERROR_STATUS, ENDPOINT_POINTS, History, Window, rounded
from gateway.admin.panels.query import parse_text
from gateway.observe.call_metrics import DURATION
from gateway.observe.gateway_metrics import MIRROR_REQUESTS
from gateway.observe.metric_store import clean_label

_ROUTE, _STATUS = map(DURATION.labels.index, ("route", "status"))

Route = dict[str, Any]


def describe_curves(history: History, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the last hour of an endpoint, or of a route. Raises ValueError."""
    if route := parse_text(query, "route"):
        return history.route_curves(route)
    upstream, url = parse_text(query, "upstream"), parse_text(query, "endpoint")
    if not upstream or not url:
        raise ValueError("expected ?route=, or ?upstream= and endpoint=")
    return history.endpoint_curves(upstream, url)


def add_flows(routes: Iterable[Route], window: Window | None, history: History) -> None:
    """Add to each route its curves, its share of 4xx, and the rates of its mirror copies."""
    routes = list(routes)
    totals, refused = _calls_by_route(window)
    copies = _copies(window)
    weights: defaultdict[str, float] = defaultdict(float)
    for route in routes:
        if mirror := route["mirror"]:
            weights[mirror["upstream"]] += _weight(route)
    for route in routes:
        name = clean_label(route["name"])
        ratio = refused[name] / totals[name] if totals[name] else None
        route["client_error_ratio"] = None if ratio is None else rounded(ratio)
        route["recent"] = history.route_curves(name, ENDPOINT_POINTS)
        if mirror := route["mirror"]:
            # Copies are counted by their upstream: several routes that lead there share them.
            weight = weights[mirror["upstream"]]
            share = _weight(route) / weight if weight else 0.0
            found = copies[clean_label(mirror["upstream"])]
            for result in ("ok", "failed", "skipped"):
                mirror[f"{result}_per_second"] = rounded(share * found.get(result, 0.0))


def _weight(route: Route) -> float:
    """Return the copies per second that a route asks for."""
    return float(route["calls_per_second"] or 0.0) * float(route["mirror"]["percent"])


def _calls_by_route(window: Window | None) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the calls per second of each route: all, and those that were refused with 4xx."""
    totals: defaultdict[str, float] = defaultdict(float)
    refused: defaultdict[str, float] = defaultdict(float)
    if window is not None:
        for labels, rate in zip(window.labels(DURATION), window.calls().tolist(), strict=False):
            totals[labels[_ROUTE]] += rate
            if labels[_STATUS] == CLIENT_ERROR_STATUS:
                refused[labels[_ROUTE]] += rate
    return totals, refused


def _copies(window: Window | None) -> Mapping[str, Mapping[str, float]]:
    """Return the mirror copies per second to each upstream, by their result."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    if window is not None:
        rates = (window.change(MIRROR_REQUESTS)[:, 0] / window.seconds).tolist()
        for (upstream, result), rate in zip(window.labels(MIRROR_REQUESTS), rates, strict=False):
            found[upstream][result] = rate
    return found
