"""Method and raw path ↔ what a request asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from urllib.parse import unquote

from gateway.sizes import CACHED_HEADS


class OperationKind(Enum):
    """What there is to ask for, in the protocol and its extensions."""

    SERVER_METADATA = "server metadata"
    INFER = "infer"
    PREDICT = "prediction of the V1 protocol"
    V1_MODEL = "readiness of a model in the V1 protocol"
    V1_MODELS = "models in the V1 protocol"
    TRACE_SETTING = "trace setting"
    LOAD = "load or unload"
    GENERATE = "generate"
    LIVENESS = "liveness"
    READINESS = "readiness"
    HEALTH = "health"
    MODEL_METADATA = "model metadata"
    CONFIG = "config"
    STATISTICS = "statistics"
    ALL_STATISTICS = "statistics of all models"
    INDEX = "repository index"
    REPOSITORY = "repository"
    LOGGING = "logging"
    SHARED_MEMORY = "shared memory"
    OTHER = "other"


PASSTHROUGH_IF_SINGLE = frozenset(
    (OperationKind.LOGGING, OperationKind.INDEX, OperationKind.ALL_STATISTICS)
)
"""The kinds that are forwarded as they are unless there are several servers to be asked."""

PASSTHROUGH = (
    frozenset(OperationKind)
    - PASSTHROUGH_IF_SINGLE
    - {
        OperationKind.SERVER_METADATA,
        OperationKind.INFER,
        OperationKind.PREDICT,
        OperationKind.V1_MODEL,
        OperationKind.V1_MODELS,
        OperationKind.TRACE_SETTING,
        OperationKind.LOAD,
        OperationKind.LIVENESS,
        OperationKind.READINESS,
    }
)
"""The kinds that are forwarded as they are; each of the others is treated in a way of its own."""

OPERATION_KINDS: Mapping[str, frozenset[OperationKind]] = MappingProxyType(
    {
        "infer": frozenset((OperationKind.INFER, OperationKind.PREDICT)),
        "generate": frozenset((OperationKind.GENERATE,)),
        "health": frozenset(
            (
                OperationKind.LIVENESS,
                OperationKind.READINESS,
                OperationKind.HEALTH,
                OperationKind.V1_MODEL,
            )
        ),
        "metadata": frozenset((OperationKind.SERVER_METADATA, OperationKind.MODEL_METADATA)),
        "config": frozenset((OperationKind.CONFIG,)),
        "statistics": frozenset((OperationKind.STATISTICS, OperationKind.ALL_STATISTICS)),
        "repository": frozenset(
            (
                OperationKind.REPOSITORY,
                OperationKind.INDEX,
                OperationKind.LOAD,
                OperationKind.V1_MODELS,
            )
        ),
        "trace": frozenset((OperationKind.TRACE_SETTING,)),
        "logging": frozenset((OperationKind.LOGGING,)),
        "shared_memory": frozenset((OperationKind.SHARED_MEMORY,)),
        "other": frozenset((OperationKind.OTHER,)),
    }
)
"""The kinds as operators name them."""

_WORDS = {kind: word for word, kinds in OPERATION_KINDS.items() for kind in kinds}


@dataclass(frozen=True, slots=True)
class Operation:
    """What a request asks for; ``model`` and ``version`` as they stand in the raw path."""

    kind: OperationKind
    model: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model's name and, if one is meant, its version."""

    name: str
    version: str | None = None


def model_name_of(operation: Operation) -> ModelName | None:
    """Return the model that an operation names; None if it names none."""
    return None if operation.model is None else ModelName(operation.model, operation.version)


# Raw paths are matched: Triton does not percent-decode model names, and gets them as they came.
_OF_A_MODEL = re.compile(
    r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?P<rest>|/.*)", re.DOTALL
)
# A repository may be named: Triton's path has room for it.
_LOAD = re.compile(
    r"(?P<room>/v2/repository(?:/[^/]+)?/models)/(?P<model>[^/]+)(?P<rest>/(?:un)?load)"
)
# The V1 protocol, where what is done with a model follows the last colon: names may have some too.
_V1_OF_A_MODEL = re.compile(
    r"/v1/models/(?P<model>[^/:][^/]*?)(?:/versions/(?P<version>[^/:][^/]*?))?"
    r"(?P<rest>|/.*|:[^/:]*)",
    re.DOTALL,
)
_STATISTICS = "/v2/models/stats"

_BY_PATH = {
    "/v2": OperationKind.SERVER_METADATA,
    "/v2/": OperationKind.SERVER_METADATA,
    "/v2/health/live": OperationKind.LIVENESS,
    "/v2/health/ready": OperationKind.READINESS,
    "/v2/trace": OperationKind.TRACE_SETTING,
    "/v2/trace/setting": OperationKind.TRACE_SETTING,
    "/v2/repository/index": OperationKind.INDEX,
    _STATISTICS: OperationKind.ALL_STATISTICS,
    "/v1/models": OperationKind.V1_MODELS,
}
_BELOW_A_MODEL = {
    "": OperationKind.MODEL_METADATA,
    "/infer": OperationKind.INFER,
    "/generate": OperationKind.GENERATE,
    "/generate_stream": OperationKind.GENERATE,
    "/ready": OperationKind.HEALTH,
    "/config": OperationKind.CONFIG,
    "/stats": OperationKind.STATISTICS,
    "/trace": OperationKind.TRACE_SETTING,
    "/trace/setting": OperationKind.TRACE_SETTING,
}
_V1_BELOW_A_MODEL = {"": OperationKind.V1_MODEL, ":predict": OperationKind.PREDICT}
# All that begins like this: servers know more such paths than the specification, as Triton does
# /v2/repository/NAME/index, and what is denied must not be had through one of those.
_BY_ROOM = {
    "repository": OperationKind.REPOSITORY,
    "logging": OperationKind.LOGGING,
    "systemsharedmemory": OperationKind.SHARED_MEMORY,
    "cudasharedmemory": OperationKind.SHARED_MEMORY,
}
# What is treated in a way of its own, or has a path that says little, is that with these methods
# alone; with any other it is of the kind that follows, and forwarded.
_METHODS = {
    OperationKind.SERVER_METADATA: (("GET",), OperationKind.OTHER),
    # As any name may be a model's, any path could be that of one's metadata, once it is encoded.
    OperationKind.MODEL_METADATA: (("GET", "HEAD"), OperationKind.OTHER),
    OperationKind.INFER: (("POST",), OperationKind.OTHER),
    OperationKind.PREDICT: (("POST",), OperationKind.OTHER),
    OperationKind.V1_MODEL: (("GET",), OperationKind.OTHER),
    OperationKind.V1_MODELS: (("GET",), OperationKind.OTHER),
    OperationKind.TRACE_SETTING: (("GET", "POST"), OperationKind.OTHER),
    OperationKind.LOAD: (("POST",), OperationKind.REPOSITORY),
    OperationKind.INDEX: (("GET", "POST"), OperationKind.REPOSITORY),
    OperationKind.ALL_STATISTICS: (("GET",), OperationKind.STATISTICS),
    OperationKind.LIVENESS: (("GET", "HEAD"), OperationKind.HEALTH),
    OperationKind.READINESS: (("GET", "HEAD"), OperationKind.HEALTH),
}


@lru_cache(maxsize=CACHED_HEADS)
def parse_operation(method: str, target: str) -> Operation:
    """Tell what a request line asks for; whatever is not known is OTHER.

    ``target`` is the raw request target; its query does not count. Model and version are those of
    every path below ``/v2/models/M`` or ``/v1/models/M``.
    """
    return _parse_path(method, target.partition("?")[0])


@lru_cache(maxsize=CACHED_HEADS)
def parse_operation_variants(method: str, target: str) -> tuple[Operation, ...]:
    """Tell what a request line asks for, in each of the ways in which servers read a path.

    Names are decoded. The first is what ``parse_operation`` gives, but for that. The others are of
    servers that decode a path before they split it, and that tidy it up then. Where these read it
    as the first does, as they do most paths, there is only one.
    """
    path = target.partition("?")[0]
    operation = parse_operation(method, target)
    # Of a path that ends with a line feed, the expressions of Starlette's routes overlook that.
    decoded = unquote(path).removesuffix("\n")
    others = [other for other in (decoded, _tidied(decoded)) if other != path]
    ways = [Operation(operation.kind, _decoded(operation.model), _decoded(operation.version))]
    return tuple(dict.fromkeys(ways + [_parse_path(method, other) for other in others]))


def _parse_path(method: str, path: str) -> Operation:
    model = version = None
    kind = _BY_PATH.get(path)
    if kind is None:
        if match := _OF_A_MODEL.fullmatch(path):
            model, version = match["model"], match["version"]
            kind = _BELOW_A_MODEL.get(match["rest"])
        elif match := _LOAD.fullmatch(path):
            model = match["model"]
            kind = OperationKind.LOAD
        elif match := _V1_OF_A_MODEL.fullmatch(path):
            model, version = match["model"], match["version"]
            kind = _V1_BELOW_A_MODEL.get(match["rest"])
        elif path.startswith("/v2/"):
            kind = _BY_ROOM.get(path.split("/")[2])
    if kind is None:
        kind = OperationKind.OTHER
    elif kind in _METHODS:
        methods, otherwise = _METHODS[kind]
        kind = kind if method in methods else otherwise
    return Operation(kind, model, version)


def _decoded(name: str | None) -> str | None:
    return None if name is None else unquote(name)


def _tidied(path: str) -> str:
    """Give a path without empty parts and dots; RFC 3986, section 5.2.4, as far as it goes."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def operation_name(kind: OperationKind) -> str:
    """Name a kind as operators do."""
    return _WORDS[kind]


def model_path(model: str, version: str | None = None, room: str = "/v2") -> str:
    """Give the path of a model's metadata; other endpoints of the model lie below it."""
    return f"{room}/models/{model}" + (f"/versions/{version}" if version is not None else "")


def strip_version(target: str) -> str:
    """Give the path of a raw request target, of which no version is named."""
    path = target.partition("?")[0]
    match = _OF_A_MODEL.fullmatch(path) or _V1_OF_A_MODEL.fullmatch(path)
    return path if match is None else model_path(match["model"], None, path[:3]) + match["rest"]


def replace_model(target: str, model: str, version: str | None = None) -> str:
    """Put another model into a raw request target; without ``version`` it keeps its own, if any.

    A target that names no model stays as it is.
    """
    path, mark, query = target.partition("?")
    if path == _STATISTICS:
        return target
    if match := _OF_A_MODEL.fullmatch(path) or _V1_OF_A_MODEL.fullmatch(path):
        kept = match["version"] if version is None else version
        return f"{model_path(model, kept, path[:3])}{match['rest']}{mark}{query}"
    if match := _LOAD.fullmatch(path):
        return f"{match['room']}/{model}{match['rest']}{mark}{query}"
    return target
