"""What only the whole of the settings shows: names that must match, routes that may be left out.

The functions take values before they are checked, so that these faults are told together with
those of the parts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.settings.words import KeyPath, among, describe

Fault = tuple[KeyPath, str]
"""Where in the settings something is wrong, and what."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def with_routes(value: Any) -> Any:
    """Return the settings with the route that goes without saying: to the one upstream."""
    upstreams = _upstreams(value)
    if len(upstreams) != 1 or "routes" in value:
        return value
    return {**value, "routes": [{"upstream": name} for name in upstreams]}


def faults(value: Any) -> Iterator[Fault]:
    """Yield what is wrong with the settings as a whole; what lacks its type is passed over."""
    upstreams = _upstreams(value)
    if not upstreams:
        return
    yield from _misnamed(upstreams)
    routes = value.get("routes", ())
    if isinstance(routes, list | tuple):
        yield from _misrouted(routes, upstreams)
    if "routes" not in value and len(upstreams) > 1:
        yield ("routes",), "required, as there is more than one upstream"


def _upstreams(value: Any) -> Mapping[str, object]:
    upstreams = value.get("upstreams") if isinstance(value, Mapping) else None
    return upstreams if isinstance(upstreams, Mapping) else {}


def _misnamed(upstreams: Mapping[str, object]) -> Iterator[Fault]:
    for name in upstreams:
        if isinstance(name, str) and not _NAME.fullmatch(name):
            path = ("upstreams", name)
            yield path, f"expected a name of letters, digits, - _ and ., got {describe(name)}"


def _misrouted(routes: Sequence[object], upstreams: Mapping[str, object]) -> Iterator[Fault]:
    if len(routes) > 1:
        yield ("routes", 1), "one route for now: this release takes no second"
    for i, route in enumerate(routes):
        name = _upstream_of(route)
        if isinstance(name, str) and name not in upstreams:
            message = f"no upstream is named {describe(name)}{among(name, upstreams)}"
            yield ("routes", i, "upstream"), message


def _upstream_of(route: object) -> object:
    if isinstance(route, Mapping):
        return route.get("upstream")
    return getattr(route, "upstream", None)
