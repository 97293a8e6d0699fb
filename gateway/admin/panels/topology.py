"""The topology: routes, upstreams and endpoints, with the rates between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from gateway.admin.history import (
    ENDPOINT_POINTS,
    ROUTE,
    UPSTREAM,
    History,
    Key,
    Rate,
    Window,
    endpoint_calls,
    rates_of,
    rounded,
    route_percentiles,
    summarize,
)
from gateway.admin.panels.calls import parse_count, parse_text
from gateway.admin.status import State, Status
from gateway.observe import families
from gateway.observe.metric_store import CounterFamily, clean_label
from gateway.settings.routes import describe_match
from gateway.settings.schema import Settings
from gateway.upstream.pool.member import STATES_WORST_FIRST

_DEFAULT_ENDPOINTS, _MAX_ENDPOINTS = 200, 2000
_MAX_MODELS = 10
"""Names of models that are listed for an endpoint."""
_IN_ORDER = ("in_use", "draining", "drained")
"""The states of endpoints that stay in the order of the settings."""


Choice = tuple[Callable[[str, Status], bool], int, int]
"""Tells whether an endpoint of an upstream is to be shown; how many to skip, and how many then."""


def parse_choice(query: Mapping[str, str]) -> Choice:
    """Read which endpoints to describe: of an upstream, and with a text. Raises ValueError."""
    upstream, search = parse_text(query, "upstream"), parse_text(query, "search").lower()

    def fits(name: str, endpoint: Status) -> bool:
        text = f"{name} {endpoint['url']} {endpoint['state']} {endpoint['state_text']}"
        return upstream in ("", name) and search in text.lower()

    offset = parse_count(query, "offset", 0)
    return fits, offset, parse_count(query, "limit", _DEFAULT_ENDPOINTS, _MAX_ENDPOINTS)


def describe_topology(
    state: State, history: History, settings: Settings, choice: Choice
) -> dict[str, Any]:
    """Return routes, and upstreams with those endpoints that were chosen, worst first.

    Percentiles of endpoints are those of the status.
    """
    rates = _EndpointRates(state.window, history)
    upstreams: list[dict[str, Any]] = []
    fits, skip, room = choice
    for name, upstream in state.status["upstreams"].items():
        states = Counter(each["state"] for each in upstream["endpoints"])
        fitting = [each for each in upstream["endpoints"] if fits(name, each)]
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
        "time": state.time,
        "actions": settings.admin.actions,
        "routes": _describe_routes(settings, state, history),
        "upstreams": upstreams,
    }


def _badness(endpoint: Status) -> int:
    """Return what sorts endpoints: the worst first, and the others as in the settings.

    A drained one keeps its place, so that the row stays where the operator pressed the button.
    """
    state = endpoint["state"]
    return len(STATES_WORST_FIRST) if state in _IN_ORDER else STATES_WORST_FIRST.index(state)


def _describe_endpoint(upstream: str, endpoint: Status, rates: _EndpointRates) -> dict[str, Any]:
    models, duration_ms = endpoint["models"], endpoint["duration_ms"] or {}
    return {
        **endpoint,
        "models": None if models is None else models[:_MAX_MODELS],
        "models_total": None if models is None else len(models),
        **{f"{name}_ms": duration_ms.get(name) for name in ("p50", "p90", "p95", "p99")},
        **rates.of_endpoint(upstream, endpoint["url"]),
    }


def _describe_routes(settings: Settings, state: State, history: History) -> list[dict[str, Any]]:
    calls: defaultdict[str, list[Rate]] = defaultdict(list)
    for labels, rate in rates_of(state.window, families.DURATION):
        calls[labels[ROUTE]].append((labels, rate))
    copies: defaultdict[Key, list[Rate]] = defaultdict(list)
    for labels, rate in rates_of(state.window, families.MIRROR_REQUESTS):
        if labels[-1] != "skipped":
            copies[labels[:-1]].append((labels, rate))
    percentiles = route_percentiles(state.minute)
    routes = []
    for number, route in enumerate(settings.routes, 1):
        name = route.name or str(number)
        label, mirror = clean_label(name), route.mirror
        own = calls[label]
        routes.append(
            {
                "name": name,
                "match": describe_match(route.match),
                "upstreams": [
                    {
                        "name": each.name,
                        "weight": each.weight,
                        **summarize(call for call in own if each.name in _upstreams(call)),
                    }
                    for each in route.upstream
                ],
                "mirror": mirror
                and {
                    "upstream": mirror.upstream,
                    "percent": mirror.percent,
                    **summarize(copies[label, clean_label(mirror.upstream)]),
                },
                **summarize(own),
                **percentiles.describe((label,)),
                "recent": history.route_curves(name, ENDPOINT_POINTS),
            }
        )
    return routes


def _upstreams(call: Rate) -> list[str]:
    return call[0][UPSTREAM].split(",")


class _EndpointRates:
    """The rates of endpoints in the last seconds."""

    def __init__(self, window: Window | None, history: History) -> None:
        self._history = history
        self._calls = endpoint_calls(window)
        self._sent = dict(rates_of(window, families.SENT_BYTES))
        self._received = dict(rates_of(window, families.RECEIVED_BYTES))
        self._failures = _rates_by(window, families.ENDPOINT_FAILURES)
        self._responses = _rates_by(window, families.RESPONSES)
        self._known = set() if window is None else set(window.labels[families.SERVER_DURATION])
        self._known |= self._failures.keys()

    def of_endpoint(self, upstream: str, url: str) -> dict[str, Any]:
        """Return the rates of an endpoint."""
        key = clean_label(upstream), clean_label(url)
        failures = self._failures.get(key, {})
        rates = {
            "calls_per_second": rounded(self._calls.get(key, 0.0)),
            "failures_per_second": rounded(sum(failures.values())),
            "failures_by_kind_per_second": failures,
            "statuses_per_second": self._responses.get(key, {}),
        }
        if key not in self._known:  # it never had a call
            return {**rates, "recent": None}
        return {
            **rates,
            "sent_bytes_per_second": rounded(self._sent.get(key, 0.0)),
            "received_bytes_per_second": rounded(self._received.get(key, 0.0)),
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


def _rates_by(
    window: Window | None, family: CounterFamily
) -> Mapping[tuple[str, ...], Mapping[str, float]]:
    """Return the rates of each endpoint by the last label of a family."""
    found: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for (*endpoint, value), rate in rates_of(window, family):
        found[*endpoint,][value] = float(f"{rate:.4g}")
    return found
