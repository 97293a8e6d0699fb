"""The RPCs beside inference, and the requests over HTTP that ask for the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gateway.protocol.operations import decode_utf8_name, model_path, quote_name

_SERVICES: Final = {
    "SystemSharedMemory": "systemsharedmemory",
    "CudaSharedMemory": "cudasharedmemory",
}


class HttpRequest(NamedTuple):
    """A request over HTTP; ``has_body`` tells whether it has a JSON body."""

    method: str
    target: str
    has_body: bool = False


class RpcRequest(NamedTuple):
    """An RPC by name, and the names that its request has for it."""

    rpc: str
    path: dict[str, str]


_OF_SERVER: Final = {
    "ServerLive": "/v2/health/live",
    "ServerReady": "/v2/health/ready",
    "ServerMetadata": "/v2",
}
_OF_MODEL: Final = {
    "ModelReady": "/ready",
    "ModelMetadata": "",
    "ModelConfig": "/config",
    "ModelStatistics": "/stats",
}
_LOADS: Final = {"RepositoryModelLoad": "load", "RepositoryModelUnload": "unload"}

_RPCS_OF_WORDS: Final = {
    "load": "Load",
    "unload": "Unload",
    "status": "Status",
    "register": "Register",
    "unregister": "Unregister",
}
_MODEL: Final = r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?"
_WORDS: Final = {
    "model_name": "model",
    "version": "version",
    "repository_name": "repository",
}
"""What errors call a name; ``name`` may be that of a model or of a region."""
_READ: Final = ("GET", "HEAD")
_BOTH: Final = ("GET", "POST")


def _path(
    methods: tuple[str, ...], pattern: str, rpc: str
) -> tuple[tuple[str, ...], re.Pattern[str], str]:
    return methods, re.compile(pattern), rpc


_PATHS: Final = (
    _path(_READ, "/v2/health/live", "ServerLive"),
    _path(_READ, "/v2/health/ready", "ServerReady"),
    _path(_READ, "/v2/?", "ServerMetadata"),
    _path(_READ, "/v2/models/stats", "ModelStatistics"),
    _path(_READ, _MODEL, "ModelMetadata"),
    _path(_READ, f"{_MODEL}/ready", "ModelReady"),
    _path(_READ, f"{_MODEL}/config", "ModelConfig"),
    _path(_READ, f"{_MODEL}/stats", "ModelStatistics"),
    _path(_BOTH, r"/v2/models/(?P<model_name>[^/]+)/trace(?:/setting)?", "TraceSetting"),
    _path(_BOTH, "/v2/trace(?:/setting)?", "TraceSetting"),
    _path(_BOTH, "/v2/logging", "LogSettings"),
    _path(_BOTH, r"/v2/repository(?:/(?P<repository_name>[^/]+))?/index", "RepositoryIndex"),
    _path(
        ("POST",),
        r"/v2/repository(?:/(?P<repository_name>[^/]+))?/models/(?P<model_name>[^/]+)"
        r"/(?P<rpc>load|unload)",
        "RepositoryModel",
    ),
    *(
        _path(
            _BOTH,
            f"/v2/{prefix}(?:/region/(?P<name>[^/]+))?/(?P<rpc>status|register|unregister)",
            service,
        )
        for service, prefix in _SERVICES.items()
    ),
)
"""The methods, the path and the RPC; groups are the names in its request."""


def http_request_of(rpc: str, path: Mapping[str, str], body: Any) -> HttpRequest:
    """Return the request over HTTP for an RPC.

    ``path`` are the names in its request, empty if they are not set; ``body`` is the rest of it.
    """
    model = path.get("model_name") or path.get("name") or ""
    version = quote_name(path.get("version", "")) or None
    of_model = model_path(quote_name(model), version)
    for service, prefix in _SERVICES.items():
        if rpc.startswith(service):
            return _shared_memory_request(prefix, rpc.removeprefix(service), model)
    if rpc in _LOADS:
        repository = path.get("repository_name", "")
        folder = f"/{quote_name(repository)}" if repository else ""
        target = f"/v2/repository{folder}/models/{quote_name(model)}/{_LOADS[rpc]}"
        return HttpRequest("POST", target, has_body=True)
    if rpc == "RepositoryIndex":
        repository = path.get("repository_name", "")
        folder = f"/{quote_name(repository)}" if repository else ""
        return HttpRequest("POST", f"/v2/repository{folder}/index", has_body=True)
    if rpc == "TraceSetting":
        target = (model_path(quote_name(model)) if model else "/v2") + "/trace/setting"
        return HttpRequest("POST" if body else "GET", target, bool(body))
    if rpc == "LogSettings":
        return HttpRequest("POST" if body else "GET", "/v2/logging", bool(body))
    if rpc == "ModelStatistics" and not model:
        return HttpRequest("GET", "/v2/models/stats")
    if rpc in _OF_MODEL:
        return HttpRequest("GET", of_model + _OF_MODEL[rpc])
    return HttpRequest("GET", _OF_SERVER[rpc])


def rpc_of(method: str, target: str) -> RpcRequest | None:
    """Return the RPC for a request over HTTP; None if there is none.

    Raises GatewayError (400) for a name that is not UTF-8.
    """
    path = target.partition("?")[0]
    for methods, pattern, rpc in _PATHS:
        match = pattern.fullmatch(path)
        if match is not None and method in methods:
            found = {
                name: decode_utf8_name(value or "", _WORDS.get(name, "name"))
                for name, value in match.groupdict().items()
            }
            kind = found.pop("rpc", "")
            return RpcRequest(rpc + _RPCS_OF_WORDS.get(kind, ""), found)
    return None


def _shared_memory_request(prefix: str, action: str, region: str) -> HttpRequest:
    folder = f"/region/{quote_name(region)}" if region else ""
    target = f"/v2/{prefix}{folder}/{action.lower()}"
    return HttpRequest("GET" if action == "Status" else "POST", target, action == "Register")
