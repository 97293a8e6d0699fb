"""The RPCs beside inference, and the requests over HTTP that ask for the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gateway.protocol.operations import decode_utf8_name, quote_name

PACKAGE: Final = "inference."

FILE_PREFIX: Final = "file:"
"""Begins the parameters of a load whose values are files: bytes over gRPC, base64 over HTTP."""


class HttpRequest(NamedTuple):
    """A request over HTTP; ``has_body`` tells whether it has a JSON body."""

    method: str
    target: str
    has_body: bool = False


class RpcRequest(NamedTuple):
    """An RPC by name, and the names that its request has for it, as far as it has them."""

    rpc: str
    path: dict[str, str]


_OF_MODEL: Final = "/v2/models/{name}[/versions/{version}]"
_LOADS: Final = "/v2/repository[/{repository_name}]/models/{model_name}"

_TARGETS: Final = {
    "ServerLive": "/v2/health/live",
    "ServerReady": "/v2/health/ready",
    "ServerMetadata": "/v2",
    "ModelStatistics": "/v2/models[/{name}[/versions/{version}]]/stats",
    "ModelReady": f"{_OF_MODEL}/ready",
    "ModelMetadata": _OF_MODEL,
    "ModelConfig": f"{_OF_MODEL}/config",
    "TraceSetting": "/v2[/models/{model_name}]/trace/setting",
    "LogSettings": "/v2/logging",
    "RepositoryIndex": "/v2/repository[/{repository_name}]/index",
    "RepositoryModelLoad": f"{_LOADS}/load",
    "RepositoryModelUnload": f"{_LOADS}/unload",
    **{
        f"{memory}SharedMemory{action}": (
            f"/v2/{memory.lower()}sharedmemory[/region/{{name}}]/{action.lower()}"
        )
        for memory in ("System", "Cuda")
        for action in ("Status", "Register", "Unregister")
    },
}
"""The path of each RPC over HTTP; what is in brackets is there if its name is known."""

RPCS: Final = frozenset(_TARGETS)
"""The methods of ``inference.GRPCInferenceService`` beside inference."""

_OTHER_TARGETS: Final = (
    ("ServerMetadata", "/v2/"),
    ("TraceSetting", "/v2[/models/{model_name}]/trace"),
)
"""Further paths that servers take for the same."""

_WORDS: Final = {"model_name": "model", "version": "version", "repository_name": "repository"}
"""What errors call a name; ``name`` may be that of a model or of a region."""

_READS: Final = ("Server", "Model")
"""How the names of RPCs begin that have no effect."""
_NAME: Final = re.compile(r"{(\w+)}")
_OPTIONAL: Final = re.compile(r"\[([^\[\]]*)\]")


def _methods(rpc: str) -> tuple[str, ...]:
    if rpc.startswith(_READS):
        return "GET", "HEAD"
    return ("POST",) if rpc.startswith("RepositoryModel") else ("GET", "POST")


def _pattern(target: str) -> re.Pattern[str]:
    optional = target.replace("[", "(?:").replace("]", ")?")
    return re.compile(_NAME.sub(r"(?P<\1>[^/]+)", optional))


_PATHS: Final = [
    (_methods(rpc), _pattern(target), rpc) for rpc, target in (*_TARGETS.items(), *_OTHER_TARGETS)
]
"""The methods, the path and the RPC; groups are the names in its request."""


def http_request_of(rpc: str, path: Mapping[str, str], body: Any) -> HttpRequest:
    """Return the request over HTTP for an RPC.

    ``path`` are the names in its request, empty if they are not set; ``body`` is the rest of it.
    """
    target = _TARGETS[rpc]
    while match := _OPTIONAL.search(target):
        is_known = all(path.get(name) for name in _NAME.findall(match[1]))
        filled = _fill(match[1], path) if is_known else ""
        target = target[: match.start()] + filled + target[match.end() :]
    target = _fill(target, path)
    has_settings = rpc in ("TraceSetting", "LogSettings")
    if rpc.startswith(_READS) or rpc.endswith("Status") or (has_settings and not body):
        return HttpRequest("GET", target)
    return HttpRequest("POST", target, not rpc.endswith("Unregister"))


def _fill(target: str, path: Mapping[str, str]) -> str:
    return _NAME.sub(lambda match: quote_name(path.get(match[1], "")), target)


def rpc_of(method: str, target: str) -> RpcRequest | None:
    """Return the RPC for a request over HTTP; None if there is none.

    Raises GatewayError (400) for a name that is not UTF-8.
    """
    path = target.partition("?")[0]
    for methods, pattern, rpc in _PATHS:
        match = pattern.fullmatch(path)
        if match is not None and method in methods:
            names = {
                name: decode_utf8_name(value, _WORDS.get(name, "name"))
                for name, value in match.groupdict().items()
                if value
            }
            return RpcRequest(rpc, names)
    return None
