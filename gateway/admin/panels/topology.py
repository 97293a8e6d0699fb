"""The topology: routes, upstreams and endpoints, with the rates between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from gateway.admin.history import (
    CLIENT_ERROR_STATUS,
    ENDPOINT_POINTS,
    ERROR_STATUSES,
    History,
    Percentiles,
    Window,
    Windows,
    endpoint_calls,
    rounded,
    route_percentiles,
)
from gateway.admin.panels.query import parse_count, parse_text
from gateway.observe.call_metrics import (
    DURATION,
    RECEIVED_BYTES,
    RESPONSES,
    SENT_BYTES,
)
from gateway.observe.gateway_metrics import ENDPOINT_FAILURES, MIRROR_REQUESTS
from gateway.observe.metric_store import CounterFamily, clean_label
from gateway.settings.routes import describe_match
from gateway.settings.schema import Settings
from gateway.upstream.pool.member import STATES_WORST_FIRST

_DEFAULT_ENDPOINTS, _MAX_ENDPOINTS = 200, 2000
_MAX_MODELS = 10
"""Names of models that are listed for an endpoint."""
_IN_ORDER = ("in_use", "draining", "drained")
"""The states of endpoints that stay in the order of the settings."""

Status = Mapping[str, Any]
EndpointKey = tuple[str, str]
"""The labels of an endpoint: upstream and URL."""
Rates = Mapping[EndpointKey, Mapping[str, float]]
"""The rates of endpoints by the value of one more label."""


@dataclass(frozen=True, slots=True)
class EndpointFilter:
    """Which endpoints to describe: those of an upstream, those with a text, and how many."""

    upstream: str
    search: str
    offset: int
    limit: int

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Self:
        """Read a query. Raises ValueError."""
        return cls(
            parse_text(query, "upstream"),
            parse_text(query, "search").lower(),
            parse_count(query, "offset", 0),
            parse_count(query, "limit", _DEFAULT_ENDPOINTS, _MAX_ENDPOINTS),
        )

    def fits(self, upstream: str, endpoint: Status) -> bool:
        """Tell whether an endpoint is among them."""
        if self.upstream and upstream != self.upstream:
            return False
        if not self.search:
            return True
        state = f"{endpoint['state']} {endpoint['state_text']}"
        text = f"{upstream} {endpoint['url']} {state}".lower()
        return self.search in text


def describe_topology(
    time: float,
    status: Status,
    windows: Windows,
    history: History,
    settings: Settings,
    chosen: EndpointFilter,
) -> dict[str, Any]:
    """Return routes, and upstreams with those endpoints that were chosen, worst first.

    ``windows`` are the last seconds, for rates, and the last minute, for percentiles of routes;
    those of endpoints are in the status.
    """
    window, minute = windows
    rates = EndpointRates(window, history)
    calls = _CallRates(window)
    upstreams, skip, room = [], chosen.offset, chosen.limit
    for name, upstream in status["upstreams"].items():
        states = Counter(each["state"] for each in upstream["endpoints"])
        fitting = [each for each in upstream["endpoints"] if chosen.fits(name, each)]
        fitting.sort(key=_badness)
        shown = fitting[skip : skip + room]
        skip, room = max(0, skip - len(fitting)), room - len(shown)
        upstreams.append(
            {
                "name": name,
                **{key: upstream[key] for key in upstream if key != "endpoints"},
                "endpoints_total": len(upstream["endpoints"]),
                "endpoints_fitting": len(fitting),
                "endpoint_states": dict(states),
                **rates.of_upstream(name),
                "endpoints": [_describe_endpoint(name, each, rates) for each in shown],
            }
        )
    return {
        "time": time,
        "actions": settings.admin.actions,
        "routes": _describe_routes(settings, calls, route_percentiles(minute), history),
        "upstreams": upstreams,
    }


def _badness(endpoint: Status) -> int:
    """Return what sorts endpoints: the worst first, and the others as in the settings.

    A drained one keeps its place, so that the row stays where the operator pressed the button.
    """
    state = endpoint["state"]
    return len(STATES_WORST_FIRST) if state in _IN_ORDER else STATES_WORST_FIRST.index(state)


def _describe_endpoint(upstream: str, endpoint: Status, rates: EndpointRates) -> dict[str, Any]:
    models, duration_ms = endpoint["models"], endpoint["duration_ms"] or {}
    return {
        **endpoint,
        "models": None if models is None else models[:_MAX_MODELS],
        "models_total": None if models is None else len(models),
        **{f"{name}_ms": duration_ms.get(name) for name in ("p50", "p90", "p95", "p99")},
        **rates.of_endpoint(upstream, endpoint["url"]),
    }


class _CallRates:
    """The calls per second of the last seconds by route and upstream."""

    def __init__(self, window: Window | None) -> None:
        self._all: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._errors: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._client_errors: defaultdict[str, float] = defaultdict(float)
        """Those of each route that were refused with 4xx."""
        self._mirrored: defaultdict[tuple[str, ...], float] = defaultdict(float)
        if window is None:
            return
        at = DURATION.labels.index
        route, upstream, status = at("route"), at("upstream"), at("status")
        for labels, rate in zip(window.labels(DURATION), window.calls().tolist(), strict=False):
            if rate:
                key = labels[route], labels[upstream]
                self._all[key] += rate
                if labels[status] in ERROR_STATUSES:
                    self._errors[key] += rate
                elif labels[status] == CLIENT_ERROR_STATUS:
                    self._client_errors[labels[route]] += rate
        copies = (window.change(MIRROR_REQUESTS)[:, 0] / window.seconds).tolist()
        self._mirrored.update(zip(window.labels(MIRROR_REQUESTS), copies, strict=False))

    def describe(self, route: str, upstream: str | None = None) -> dict[str, float | None]:
        """Return the rates of a route, or of its calls to an upstream."""
        route = clean_label(route)
        keys = [
            key
            for key in self._all
            if key[0] == route and (upstream is None or upstream in key[1].split(","))
        ]
        total = sum(self._all[key] for key in keys)
        errors = sum(self._errors[key] for key in keys)
        ratio = rounded(errors / total) if total else None
        return {"calls_per_second": rounded(total), "error_ratio": ratio}

    def client_error_ratio(self, route: str) -> float | None:
        """Return the share of a route's calls that were refused with 4xx; None without calls."""
        route = clean_label(route)
        total = sum(rate for key, rate in self._all.items() if key[0] == route)
        return rounded(self._client_errors[route] / total) if total else None

    def describe_mirror(self, route: str, upstream: str) -> dict[str, float | None]:
        """Return the rates of the copies of a route's calls, and the shares that went wrong."""
        key = clean_label(route), clean_label(upstream)
        ok, rejected, failed = (
            self._mirrored[*key, result] for result in ("ok", "rejected", "failed")
        )
        total = ok + rejected + failed
        return {
            "calls_per_second": rounded(total),
            "error_ratio": rounded(failed / total) if total else None,
            "client_error_ratio": rounded(rejected / total) if total else None,
        }


def _describe_routes(
    settings: Settings, rates: _CallRates, percentiles: Percentiles, history: History
) -> list[dict[str, Any]]:
    routes = []
    for number, route in enumerate(settings.routes, 1):
        name = route.name or str(number)
        mirror = route.mirror
        routes.append(
            {
                "name": name,
                "match": describe_match(route.match),
                "upstreams": [
                    {"name": each.name, "weight": each.weight, **rates.describe(name, each.name)}
                    for each in route.upstream
                ],
                "mirror": mirror
                and {
                    "upstream": mirror.upstream,
                    "percent": mirror.percent,
                    **rates.describe_mirror(name, mirror.upstream),
                },
                **rates.describe(name),
                "client_error_ratio": rates.client_error_ratio(name),
                **percentiles.describe((clean_label(name),)),
                "recent": history.route_curves(name, ENDPOINT_POINTS),
            }
        )
    return routes


class EndpointRates:
    """The rates of endpoints in the last seconds."""

    def __init__(self, window: Window | None, history: History) -> None:
        self._history = history
        self._window = window
        self._calls: Mapping[tuple[str, ...], float] = {}
        self._failures: Rates = {}
        self._responses: Rates = {}
        if window is None:
            return
        self._calls = endpoint_calls(window)
        self._sent = self._byte_rates(window, SENT_BYTES)
        self._received = self._byte_rates(window, RECEIVED_BYTES)
        self._failures = self._rates_by(window, ENDPOINT_FAILURES)
        self._responses = self._rates_by(window, RESPONSES)

    def of_endpoint(self, upstream: str, url: str) -> dict[str, Any]:
        """Return the rates of an endpoint."""
        key = clean_label(upstream), clean_label(url)
        calls = self._calls.get(key)
        failures = self._failures.get(key, {})
        rates = {
            "calls_per_second": rounded(calls or 0.0),
            "failures_per_second": rounded(sum(failures.values())),
            "failures_by_kind_per_second": failures,
            "statuses_per_second": self._responses.get(key, {}),
        }
        if calls is None:  # it never had one
            return {**rates, "recent": None}
        return {
            **rates,
            "sent_bytes_per_second": self._sent.get(key, 0.0),
            "received_bytes_per_second": self._received.get(key, 0.0),
            "recent": self._history.endpoint_curves(upstream, url, ENDPOINT_POINTS),
        }

    def of_upstream(self, upstream: str) -> dict[str, float | None]:
        """Return the rates of all endpoints of an upstream."""
        name = clean_label(upstream)
        calls = sum(rate for key, rate in self._calls.items() if key[0] == name)
        failures = sum(
            sum(rates.values()) for key, rates in self._failures.items() if key[0] == name
        )
        return {"calls_per_second": rounded(calls), "failures_per_second": rounded(failures)}

    @staticmethod
    def _rates_by(window: Window, family: CounterFamily) -> Rates:
        """Return the rates of each endpoint by the last label of a family."""
        found: defaultdict[EndpointKey, dict[str, float]] = defaultdict(dict)
        rates = (window.change(family)[:, 0] / window.seconds).tolist()
        for labels, rate in zip(window.labels(family), rates, strict=False):
            if rate:
                upstream, url, value = labels
                found[upstream, url][value] = float(f"{rate:.4g}")
        return found

    @staticmethod
    def _byte_rates(window: Window, family: CounterFamily) -> dict[EndpointKey, float | None]:
        rates = (window.change(family)[:, 0] / window.seconds).tolist()
        rows = _rows(window.labels(family), len(rates))
        return {key: rounded(rates[row]) for key, row in rows.items()}


def _rows(labels: Sequence[tuple[str, ...]], count: int) -> dict[EndpointKey, int]:
    """Return the row of each endpoint."""
    return {(upstream, url): row for row, (upstream, url) in enumerate(labels[:count])}
