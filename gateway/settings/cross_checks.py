"""Checks across sections: names that must match, routes that are never reached, missing files.

The functions take values before pydantic has checked them, so that one run reports all errors.
They pass over values of a wrong type.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from errno import EACCES, EISDIR, ENOENT
from importlib.util import find_spec
from pathlib import Path
from stat import S_ISDIR
from typing import Any, get_args

from gateway.settings.routes import OperationName
from gateway.settings.sections import as_admin_section
from gateway.settings.values.addresses import has_host_name, is_grpc
from gateway.settings.values.fields import as_tuple
from gateway.settings.values.patterns import parse_path_part
from gateway.settings.values.wording import KeyPath, describe, suggest

CrossError = tuple[KeyPath, str]
"""The path of a setting, and what is wrong with it."""

_DEFAULT_LISTEN = "127.0.0.1:8080"
_NEED_ADMIN_KEYS = ("actions", "payloads")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NO_NAME = "expected a name of letters, digits, - _ and ., got {}"
_PLAIN = ("http://", "grpc://", "unix:")
_SERVER_TLS_FILES = ("certificate", "key", "client_ca")
_UPSTREAM_TLS_FILES = ("ca", "certificate", "key")
_TRACING_PACKAGES = ("opentelemetry.proto", "google.protobuf")
_ONE_PROTOCOL_EACH = (
    "if one server speaks both, write it as {http: URL, grpc: URL}, else an upstream for each"
)
_GRPC_HEALTH_PATH = re.compile(
    r"/v2/(?:health/(?:live|ready)|models/[^/]+(?:/versions/[^/]+)?/ready)"
)


def with_default_route(value: Any) -> Any:
    """Return the settings; without routes, a single upstream gets one that takes all requests."""
    upstreams = _mapping(value, "upstreams")
    if len(upstreams) != 1 or "routes" in value:
        return value
    return {**value, "routes": [{"upstream": name} for name in upstreams]}


def cross_check(value: object) -> Iterator[CrossError]:
    """Yield the errors that no section shows on its own."""
    if not isinstance(value, Mapping):
        return
    tls, upstreams, routes = value.get("tls"), _mapping(value, "upstreams"), _list(value, "routes")
    if _value(tls, "client_certificates") is not None and _value(tls, "client_ca") is None:
        why = "needs client_ca, the certificates of those who issue certificates to clients"
        yield ("tls", "client_certificates"), why
    yield from _admin(value)
    yield from _key_groups(value, routes)
    yield from _model_names(_mapping(value, "models"))
    if not upstreams:
        return
    yield from _invalid_names("upstreams", upstreams)
    for name, upstream in upstreams.items():
        errors = (*_upstream_tls(upstream), *_dns_refresh(upstream), *_grpc(upstream))
        for path, message in errors:
            yield ("upstreams", name, *path), message
    yield from _routes(routes, upstreams)
    yield from _route_names(routes)
    yield from _hash_headers_with_keys(_mapping(value, "api_keys"), routes, upstreams)
    if "routes" not in value and len(list(filter(_endpoints, upstreams.values()))) > 1:
        yield ("routes",), "required, as there is more than one upstream"


def unusable(
    value: object, environ: Mapping[str, str], with_read_files: bool
) -> Iterator[CrossError]:
    """Yield what settings name and what cannot be used: packages, and files that are written.

    ``with_read_files`` adds files that are read, and variables.
    """
    upstreams, groups = _mapping(value, "upstreams"), _mapping(value, "api_keys")
    files: list[tuple[str, ...]] = [("tls", name) for name in _SERVER_TLS_FILES]
    files.append(("tracing", "ca"))
    for each in upstreams:
        files += [("upstreams", each, "tls", name) for name in _UPSTREAM_TLS_FILES]
    files += [("api_keys", group, "file") for group in groups]
    variables = [("api_keys", group, "environment") for group in groups]
    for path, variable in _texts(value, variables if with_read_files else ()):
        # Text that is no name of a variable may be a key.
        if variable.isidentifier() and variable not in environ:
            yield path, f"{variable} is not set in the environment"
    for path, file in _texts(value, files if with_read_files else ()):
        if reason := _read_error(file):
            yield path, f"{file} cannot be read: {reason}"
    yield from missing_packages(value)
    for path, file in _texts(value, [("log", "access", "path")]):
        if reason := _write_error(file):
            yield path, f"{file} cannot be written: {reason}"


def _texts(value: object, paths: Iterable[tuple[str, ...]]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the texts at some paths, each with its path."""
    for path in paths:
        text = _value(value, *path)
        if isinstance(text, str) and text:
            yield path, text


def missing_packages(value: object) -> Iterator[CrossError]:
    """Yield the sections that take packages which are not installed."""
    tracing = _value(value, "tracing")
    if not isinstance(tracing, Mapping):
        return
    needed = _TRACING_PACKAGES + (("grpc",) if tracing.get("protocol") == "grpc" else ())
    missing = [name for name in needed if not _is_installed(name)]
    if missing:
        what = f"it takes the Python package {missing[0]}, which is not installed"
        yield ("tracing",), f"{what}: pip install 'tensorgate[otel]'"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # that of a package around it
        return False


def _read_error(file: str) -> str | None:
    """Return why a file cannot be read."""
    reason = _access_error(file, os.R_OK)
    if reason == os.strerror(ENOENT) and not os.path.isabs(file) and "\0" not in file:
        return f"{reason} (in {Path.cwd()})"
    return reason


def _write_error(file: str) -> str | None:
    """Return why a file cannot be written, or not be made if it does not exist."""
    reason = _access_error(file, os.W_OK)
    if reason != os.strerror(ENOENT) or "\0" in file:
        return reason
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    return _denial(folder, os.W_OK | os.X_OK)


def _access_error(file: str, mode: int) -> str | None:
    """Return why a file cannot be used; it is not opened, as it may be a pipe."""
    try:
        is_folder = S_ISDIR(os.stat(file).st_mode)
    except OSError as error:
        return error.strerror
    except ValueError:  # a NUL
        return os.strerror(ENOENT)
    return os.strerror(EISDIR) if is_folder else _denial(file, mode)


def _denial(file: str, mode: int) -> str | None:
    is_allowed = os.access(file, mode, effective_ids=os.access in os.supports_effective_ids)
    return None if is_allowed else os.strerror(EACCES)


def _key_groups(value: object, routes: Sequence[object]) -> Iterator[CrossError]:
    groups, used = _mapping(value, "api_keys"), list(_auth_groups(routes))
    if isinstance(of_operators := _value(value, "admin", "keys"), str):
        used.append((("admin", "keys"), of_operators))
    for path, name in used:
        if name not in groups:
            known = suggest(name, groups) if groups else "; there are none"
            yield path, f"no group of API keys is named {describe(name)}{known}"
    yield from _invalid_names("api_keys", groups)
    for name in groups:
        if name not in [group for _, group in used]:
            yield ("api_keys", name), "not used: neither a route (auth) nor admin.keys names it"


def _auth_groups(routes: Sequence[object]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the groups of keys that routes name, each with its path."""
    for i, route in enumerate(routes):
        for j, name in enumerate(as_tuple(_value(route, "auth"))):
            if isinstance(name, str):
                yield ("routes", i, "auth", j), name


def _hash_headers_with_keys(
    keys: Mapping[str, object], routes: Sequence[object], upstreams: Mapping[str, object]
) -> Iterator[CrossError]:
    """Yield the hash headers that hold API keys: the gateway does not pass those on."""
    for name, upstream in upstreams.items():
        header = _value(upstream, "load_balancing", "hash_header")
        leading = [route for route in routes if name in [to for _, to in _all_upstreams(route)]]
        holding = _key_headers(keys, [group for _, group in _auth_groups(leading)])
        if isinstance(header, str) and (group := holding.get(header.lower())):
            path = ("upstreams", name, "load_balancing", "hash_header")
            why = f"{header} holds API keys ({group}), so that it cannot choose the endpoint too"
            yield path, why


def _key_headers(keys: Mapping[str, object], used: Sequence[str]) -> dict[str, str]:
    """Return the headers that hold keys, in lower case, each with the name of a group.

    Authorization counts only where a route uses a group whose keys it holds.
    """
    holding: dict[str, str] = {}
    for name, group in keys.items():
        header = _value(group, "header")
        if isinstance(header, str):
            holding[header.lower()] = name
        elif name in used:
            holding["authorization"] = name
    return holding


def _admin(value: Mapping[str, object]) -> Iterator[CrossError]:
    section = as_admin_section(value.get("admin"))
    address, keys = _value(section, "listen"), _value(section, "keys")
    if address is not None and address in as_tuple(value.get("listen") or _DEFAULT_LISTEN):
        yield ("admin", "listen"), "needs an address of its own: clients connect there (listen)"
    allowed = [name for name in _NEED_ADMIN_KEYS if _value(section, name) is True]
    if keys is None:
        for name in allowed:
            yield ("admin", name), "needs keys, the group of API keys that allow it"
    elif not allowed:
        yield ("admin", "keys"), f"not used: {' and '.join(_NEED_ADMIN_KEYS)} are false"
    if isinstance(keys, str) and _value(value, "api_keys", keys, "header"):
        path = ("admin", "keys")
        yield path, "needs a group without header: the page sends keys as Bearer tokens"
    for name in ("hosts", *_NEED_ADMIN_KEYS):
        if address is None and _value(section, name):
            yield ("admin", name), "not used: there is no admin address (listen)"


def _invalid_names(section: str, names: Iterable[object]) -> Iterator[CrossError]:
    for name in names:
        if isinstance(name, str) and not _NAME.fullmatch(name):
            yield (section, name), _NO_NAME.format(describe(name))


def _route_names(routes: Sequence[object]) -> Iterator[CrossError]:
    first: dict[str, int] = {}
    for index, route in enumerate(routes):
        name = _value(route, "name")
        if not isinstance(name, str):
            continue
        path = ("routes", index, "name")
        if not _NAME.fullmatch(name):
            yield path, _NO_NAME.format(describe(name))
        elif name.isdecimal():
            yield path, f"a number is the name of a route without a name, got {describe(name)}"
        elif first.setdefault(name, index) != index:
            yield path, f"the name {describe(name)} is that of routes[{first[name]}] already"


def _model_names(models: Iterable[str]) -> Iterator[CrossError]:
    for name in models:
        try:
            parse_path_part(name)
        except ValueError as error:
            yield ("models", name), str(error)
        else:
            if "*" in name:
                yield ("models", name), f"expected a model's exact name, got {describe(name)}"


def _upstream_tls(upstream: object) -> Iterator[CrossError]:
    tls, urls = _value(upstream, "tls"), _urls(upstream)
    if not isinstance(upstream, Mapping) or not isinstance(tls, Mapping):
        return
    if urls and all(isinstance(url, str) and url.lower().startswith(_PLAIN) for url in urls):
        yield ("tls",), "no endpoint needs it: none is https or grpcs"
    for name, other in (("certificate", "key"), ("key", "certificate")):
        if tls.get(name) is None and tls.get(other) is not None:
            yield ("tls", name), f"required, as there is a {other}"


def _dns_refresh(upstream: object) -> Iterator[CrossError]:
    if _value(upstream, "dns_refresh") is None:
        return
    urls = [url for url in _urls(upstream) if isinstance(url, str)]
    if urls and not any(map(has_host_name, urls)):
        yield ("dns_refresh",), "no endpoint has a host name that could be looked up"


def _endpoints(upstream: object) -> tuple[object, ...]:
    endpoints = _value(upstream, "endpoints")
    return (endpoints,) if isinstance(endpoints, Mapping) else as_tuple(endpoints)


def _urls(upstream: object) -> list[object]:
    urls: list[object] = []
    for each in _endpoints(upstream):
        urls += [each.get("http"), each.get("grpc")] if isinstance(each, Mapping) else [each]
    return urls


def _grpc(upstream: object) -> Iterator[CrossError]:
    endpoints = _endpoints(upstream)
    texts = [endpoint for endpoint in endpoints if isinstance(endpoint, str)]
    if any(isinstance(endpoint, Mapping) for endpoint in endpoints):
        if texts:
            one = f"all of them must have both addresses, or none: {describe(texts[0])} has one"
            yield ("endpoints",), f"{one}; {_ONE_PROTOCOL_EACH}"
        return
    if endpoints and _value(upstream, "inference_protocol") in ("http", "grpc"):
        yield ("inference_protocol",), "needs endpoints with both addresses: {http: URL, grpc: URL}"
    others = [endpoint for endpoint in texts if not is_grpc(endpoint)]
    if len(others) == len(texts):
        return
    if others:
        one = f"{describe(others[0])} is not"
        yield ("endpoints",), f"all of them must be gRPC, or none: {one}; {_ONE_PROTOCOL_EACH}"
    target = _value(upstream, "health_check", "path")
    if isinstance(target, str) and not _GRPC_HEALTH_PATH.fullmatch(target):
        instead = "write /v2/health/ready, /v2/health/live or /v2/models/MODEL/ready"
        path = ("health_check", "path")
        yield path, f"no RPC of gRPC endpoints is like {describe(target)}; {instead}"


def _routes(routes: Sequence[object], upstreams: Mapping[str, object]) -> Iterator[CrossError]:
    catch_all: int | None = None
    for i, route in enumerate(routes):
        for path, name in _all_upstreams(route):
            if name not in upstreams:
                message = f"no upstream is named {describe(name)}{suggest(name, upstreams)}"
                yield ("routes", i, *path), message
        own = [name for _, name in _own_upstreams(route)]
        if own == [_value(route, "mirror", "upstream")]:
            yield ("routes", i, "mirror", "upstream"), "mirrors to itself: it is the route's own"
        if catch_all is not None:
            yield ("routes", i), f"never reached: routes[{catch_all}] takes every request"
        elif _matches_everything(route):
            catch_all = i


def _all_upstreams(route: object) -> Iterator[tuple[KeyPath, str]]:
    """Yield the upstreams that a route names, its mirror included, each with its path."""
    yield from _own_upstreams(route)
    mirror = _value(route, "mirror", "upstream")
    if isinstance(mirror, str):
        yield ("mirror", "upstream"), mirror


def _own_upstreams(route: object) -> Iterator[tuple[KeyPath, str]]:
    """Yield the upstreams that answer the requests of a route, each with its path."""
    named = _value(route, "upstream")
    if isinstance(named, str):
        yield ("upstream",), named
        return
    for i, share in enumerate(_list(route, "upstream")):
        name = _value(share, "name")
        if isinstance(name, str):
            yield ("upstream", i, "name"), name


def _matches_everything(route: object) -> bool:
    """Tell whether a valid route takes every request."""
    match = _value(route, "match") or {}
    if not _value(route, "upstream") or not isinstance(match, Mapping):
        return False
    return all(
        value is None or value == {} or (name == "operations" and _are_all_operations(value))
        for name, value in match.items()
    )


def _are_all_operations(value: object) -> bool:
    return all(name in as_tuple(value) for name in get_args(OperationName))


def _value(section: object, *path: str) -> object:
    """Return a value below a section; None if there is none."""
    for name in path:
        section = section.get(name) if isinstance(section, Mapping) else None
    return section


def _mapping(section: object, name: str) -> Mapping[str, object]:
    found = _value(section, name)
    return found if isinstance(found, Mapping) else {}


def _list(section: object, name: str) -> Sequence[object]:
    found = _value(section, name)
    return found if isinstance(found, list | tuple) else ()
