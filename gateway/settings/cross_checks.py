"""What only the whole of the settings shows: names that must match, routes that may be left out.

The functions take values before they are checked, so that these faults are told together with
those of the parts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from gateway.settings.routes import Match, OperationName
from gateway.settings.values.addresses import has_host_name
from gateway.settings.values.fields import as_tuple
from gateway.settings.values.patterns import parse_path_part
from gateway.settings.values.wording import KeyPath, describe, suggest

CrossError = tuple[KeyPath, str]
"""Where in the settings something is wrong, and what."""

_LISTEN = "127.0.0.1:8080"
"""Where clients connect if nothing is said."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def with_default_route(value: Any) -> Any:
    """Return the settings with the route that goes without saying: to the one upstream."""
    upstreams = _upstreams(value)
    if len(upstreams) != 1 or "routes" in value:
        return value
    return {**value, "routes": [{"upstream": name} for name in upstreams]}


def cross_check(value: Any) -> Iterator[CrossError]:
    """Yield what is wrong with the settings as a whole; what lacks its type is passed over."""
    yield from _unasked_certificates(_value(value, "tls"))
    yield from _admin_among_clients(value)
    yield from _mistaken_keys(value)
    yield from _misnamed_models(_value(value, "models"))
    upstreams = _upstreams(value)
    if not upstreams:
        return
    yield from _misnamed("upstreams", upstreams)
    for name, upstream in upstreams.items():
        for path, message in (*_mistaken_tls(upstream), *_without_names(upstream)):
            yield ("upstreams", name, *path), message
    routes = value.get("routes", ())
    if isinstance(routes, list | tuple):
        yield from _misrouted(routes, upstreams)
        yield from _hashed_keys(_value(value, "api_keys"), routes, upstreams)
    if "routes" not in value and len(upstreams) > 1:
        yield ("routes",), "required, as there is more than one upstream"


def _upstreams(value: Any) -> Mapping[str, object]:
    upstreams = value.get("upstreams") if isinstance(value, Mapping) else None
    return upstreams if isinstance(upstreams, Mapping) else {}


def _unasked_certificates(tls: object) -> Iterator[CrossError]:
    if _value(tls, "client_certificates") is not None and _value(tls, "client_ca") is None:
        path = ("tls", "client_certificates")
        yield path, "needs client_ca, the file of who issues the clients' certificates"


def _mistaken_keys(value: Any) -> Iterator[CrossError]:
    keys, routes = _value(value, "api_keys"), _value(value, "routes")
    groups = keys if isinstance(keys, Mapping) else {}
    asked_for = list(_auth_of(routes if isinstance(routes, list | tuple) else ()))
    for path, name in asked_for:
        if name not in groups:
            known = suggest(name, groups) if groups else "; there are none"
            yield path, f"no keys are named {describe(name)}{known}"
    yield from _misnamed("api_keys", groups)
    for name in groups:
        if name not in [asked for _, asked in asked_for]:
            yield ("api_keys", name), "no route asks for these: name them in its auth"


def _auth_of(routes: Sequence[object]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the names of the keys that routes ask for, each with its place."""
    for i, route in enumerate(routes):
        for j, name in enumerate(as_tuple(_value(route, "auth"))):
            if isinstance(name, str):
                yield ("routes", i, "auth", j), name


def _hashed_keys(
    keys: object, routes: Sequence[object], upstreams: Mapping[str, object]
) -> Iterator[CrossError]:
    """Yield where endpoints are to be chosen by a header that holds keys: it is not passed on."""
    for name, upstream in upstreams.items():
        header = _value(_value(upstream, "load_balancing"), "hash_header")
        leading = [route for route in routes if name in [to for _, to in _upstreams_of(route)]]
        holding = _key_headers(keys, [group for _, group in _auth_of(leading)])
        if isinstance(header, str) and (group := holding.get(header.lower())):
            path = ("upstreams", name, "load_balancing", "hash_header")
            yield (
                path,
                f"{header} holds keys ({group}): no server gets it, and none can be chosen by it",
            )


def _key_headers(keys: object, asked_for: Sequence[str]) -> dict[str, str]:
    """Give the headers that hold keys, in lower case, each with the name of a group.

    Authorization passes where it holds something else, unless one of its groups is asked for.
    """
    holding: dict[str, str] = {}
    for name, group in keys.items() if isinstance(keys, Mapping) else ():
        header = _value(group, "header")
        if isinstance(header, str):
            holding[header.lower()] = name
        elif name in asked_for:
            holding["authorization"] = name
    return holding


def _admin_among_clients(value: object) -> Iterator[CrossError]:
    admin, listen = _value(value, "admin"), _value(value, "listen") or _LISTEN
    if admin is not None and admin in as_tuple(listen):
        yield ("admin",), "needs an address of its own: clients connect there (listen)"


def _misnamed(section: str, names: Iterable[object]) -> Iterator[CrossError]:
    for name in names:
        if isinstance(name, str) and not _NAME.fullmatch(name):
            path = (section, name)
            yield path, f"expected a name of letters, digits, - _ and ., got {describe(name)}"


def _misnamed_models(models: object) -> Iterator[CrossError]:
    for name in models if isinstance(models, Mapping) else ():
        try:
            parse_path_part(name)
        except ValueError as error:
            yield ("models", name), str(error)
        else:
            if "*" in name:
                yield ("models", name), f"expected a model's exact name, got {describe(name)}"


def _mistaken_tls(upstream: object) -> Iterator[CrossError]:
    tls, endpoints = _value(upstream, "tls"), as_tuple(_value(upstream, "endpoints"))
    if not isinstance(upstream, Mapping) or not isinstance(tls, Mapping):
        return
    if endpoints and all(map(_is_without_tls, endpoints)):
        yield ("tls",), "no endpoint needs it: none is https"
    for name, other in (("certificate", "key"), ("key", "certificate")):
        if tls.get(name) is None and tls.get(other) is not None:
            yield ("tls", name), f"required, as there is a {other}"


def _without_names(upstream: object) -> Iterator[CrossError]:
    if _value(upstream, "dns_refresh") is None:
        return
    endpoints = as_tuple(_value(upstream, "endpoints"))
    texts = [endpoint for endpoint in endpoints if isinstance(endpoint, str)]
    if texts and not any(map(has_host_name, texts)):
        yield ("dns_refresh",), "no endpoint has a host name that could be looked up"


def _is_without_tls(endpoint: object) -> bool:
    return isinstance(endpoint, str) and endpoint.lower().startswith(("http://", "unix:"))


def _misrouted(routes: Sequence[object], upstreams: Mapping[str, object]) -> Iterator[CrossError]:
    taken: int | None = None
    for i, route in enumerate(routes):
        for path, name in _upstreams_of(route):
            if name not in upstreams:
                message = f"no upstream is named {describe(name)}{suggest(name, upstreams)}"
                yield ("routes", i, *path), message
        if _mirrors_to_itself(route):
            yield ("routes", i, "mirror", "upstream"), "mirrors to itself: it is the route's own"
        if taken is not None:
            yield ("routes", i), f"never reached: routes[{taken}] takes every request"
        elif _takes_all(route):
            taken = i


def _upstreams_of(route: object) -> Iterator[tuple[KeyPath, str]]:
    """Yield the names of the upstreams that a route leads to, each with its place."""
    yield from _answering(route)
    mirror = _value(_value(route, "mirror"), "upstream")
    if isinstance(mirror, str):
        yield ("mirror", "upstream"), mirror


def _answering(route: object) -> Iterator[tuple[KeyPath, str]]:
    """Yield the names of the upstreams that answer, each with its place."""
    named = _value(route, "upstream")
    if isinstance(named, str):
        yield ("upstream",), named
        return
    for i, share in enumerate(named if isinstance(named, list | tuple) else ()):
        name = _value(share, "name")
        if isinstance(name, str):
            yield ("upstream", i, "name"), name


def _mirrors_to_itself(route: object) -> bool:
    names = [name for _, name in _answering(route)]
    return names == [_value(_value(route, "mirror"), "upstream")]


def _takes_all(route: object) -> bool:
    """Tell whether a route, as far as it is one, takes all requests that come to it."""
    match = _value(route, "match") or {}
    if not _value(route, "upstream") or not isinstance(match, Mapping | Match):
        return False
    return all(
        value is None or value == {} or (name == "operations" and _are_all_kinds(value))
        for name, value in dict(match).items()
    )


def _are_all_kinds(value: object) -> bool:
    return all(kind in as_tuple(value) for kind in get_args(OperationName))


def _value(section: object, name: str) -> object:
    """Return what a section says, as it came or as it was checked."""
    if isinstance(section, Mapping):
        return section.get(name)
    return getattr(section, name, None)
