"""Method and raw path ↔ what a request asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType


class EndpointKind(Enum):
    """What there is to ask for, in the protocol and its extensions."""

    SERVER_METADATA = "server metadata"
    INFER = "infer"
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


UNTOUCHED_IF_ONE = frozenset(
    (EndpointKind.LOGGING, EndpointKind.INDEX, EndpointKind.ALL_STATISTICS)
)
"""The kinds that are forwarded as they are unless there are several servers to be asked."""

UNTOUCHED = (
    frozenset(EndpointKind)
    - UNTOUCHED_IF_ONE
    - {
        EndpointKind.SERVER_METADATA,
        EndpointKind.INFER,
        EndpointKind.TRACE_SETTING,
        EndpointKind.LOAD,
        EndpointKind.LIVENESS,
        EndpointKind.READINESS,
    }
)
"""The kinds that are forwarded as they are; each of the others is treated in a way of its own."""

KINDS: Mapping[str, frozenset[EndpointKind]] = MappingProxyType(
    {
        "infer": frozenset((EndpointKind.INFER,)),
        "generate": frozenset((EndpointKind.GENERATE,)),
        "health": frozenset((EndpointKind.LIVENESS, EndpointKind.READINESS, EndpointKind.HEALTH)),
        "metadata": frozenset((EndpointKind.SERVER_METADATA, EndpointKind.MODEL_METADATA)),
        "config": frozenset((EndpointKind.CONFIG,)),
        "statistics": frozenset((EndpointKind.STATISTICS, EndpointKind.ALL_STATISTICS)),
        "repository": frozenset((EndpointKind.REPOSITORY, EndpointKind.INDEX, EndpointKind.LOAD)),
        "trace": frozenset((EndpointKind.TRACE_SETTING,)),
        "logging": frozenset((EndpointKind.LOGGING,)),
        "shared_memory": frozenset((EndpointKind.SHARED_MEMORY,)),
        "other": frozenset((EndpointKind.OTHER,)),
    }
)
"""The kinds as operators name them."""

_WORDS = {kind: word for word, kinds in KINDS.items() for kind in kinds}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a request asks for; ``model`` and ``version`` as they stand in the raw path."""

    kind: EndpointKind
    model: str | None = None
    version: str | None = None


# Raw paths are matched: Triton does not percent-decode model names, so neither do we.
_OF_A_MODEL = re.compile(
    r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?P<rest>|/.*)", re.DOTALL
)
# A repository may be named: Triton's path has room for it.
_LOAD = re.compile(
    r"(?P<room>/v2/repository(?:/[^/]+)?/models)/(?P<model>[^/]+)(?P<rest>/(?:un)?load)"
)
_STATISTICS = "/v2/models/stats"

_BY_PATH = {
    "/v2": EndpointKind.SERVER_METADATA,
    "/v2/": EndpointKind.SERVER_METADATA,
    "/v2/health/live": EndpointKind.LIVENESS,
    "/v2/health/ready": EndpointKind.READINESS,
    "/v2/trace": EndpointKind.TRACE_SETTING,
    "/v2/trace/setting": EndpointKind.TRACE_SETTING,
    "/v2/repository/index": EndpointKind.INDEX,
    _STATISTICS: EndpointKind.ALL_STATISTICS,
}
_BELOW_A_MODEL = {
    "": EndpointKind.MODEL_METADATA,
    "/infer": EndpointKind.INFER,
    "/generate": EndpointKind.GENERATE,
    "/generate_stream": EndpointKind.GENERATE,
    "/ready": EndpointKind.HEALTH,
    "/config": EndpointKind.CONFIG,
    "/stats": EndpointKind.STATISTICS,
    "/trace": EndpointKind.TRACE_SETTING,
    "/trace/setting": EndpointKind.TRACE_SETTING,
}
# All that begins like this: servers know more such paths than the specification, as Triton does
# /v2/repository/NAME/index, and what is denied must not be had through one of those.
_BY_ROOM = {
    "repository": EndpointKind.REPOSITORY,
    "logging": EndpointKind.LOGGING,
    "systemsharedmemory": EndpointKind.SHARED_MEMORY,
    "cudasharedmemory": EndpointKind.SHARED_MEMORY,
}
# What is treated in a way of its own is that with these methods alone; with any other it is of the
# kind that follows, and forwarded.
_METHODS = {
    EndpointKind.SERVER_METADATA: (("GET",), EndpointKind.OTHER),
    EndpointKind.INFER: (("POST",), EndpointKind.OTHER),
    EndpointKind.TRACE_SETTING: (("GET", "POST"), EndpointKind.OTHER),
    EndpointKind.LOAD: (("POST",), EndpointKind.REPOSITORY),
    EndpointKind.INDEX: (("GET", "POST"), EndpointKind.REPOSITORY),
    EndpointKind.ALL_STATISTICS: (("GET",), EndpointKind.STATISTICS),
    EndpointKind.LIVENESS: (("GET", "HEAD"), EndpointKind.HEALTH),
    EndpointKind.READINESS: (("GET", "HEAD"), EndpointKind.HEALTH),
}


@lru_cache(maxsize=256)
def parse_endpoint(method: str, target: str) -> Endpoint:
    """Tell what a request line asks for; whatever is not known is OTHER.

    ``target`` is the raw request target; its query does not count. Model and version are those of
    every path below ``/v2/models/M``.
    """
    path = target.partition("?")[0]
    model = version = None
    kind = _BY_PATH.get(path)
    if kind is None:
        if match := _OF_A_MODEL.fullmatch(path):
            model, version = match["model"], match["version"]
            kind = _BELOW_A_MODEL.get(match["rest"])
        elif match := _LOAD.fullmatch(path):
            model = match["model"]
            kind = EndpointKind.LOAD
        elif path.startswith("/v2/"):
            kind = _BY_ROOM.get(path.split("/")[2])
    if kind is None:
        kind = EndpointKind.OTHER
    elif kind in _METHODS:
        methods, otherwise = _METHODS[kind]
        kind = kind if method in methods else otherwise
    return Endpoint(kind, model, version)


def kind_word(kind: EndpointKind) -> str:
    """Name a kind as operators do."""
    return _WORDS[kind]


def model_path(model: str, version: str | None = None) -> str:
    """Give the path of a model's metadata; other endpoints of the model lie below it."""
    return f"/v2/models/{model}" + (f"/versions/{version}" if version is not None else "")


def without_version(target: str) -> str:
    """Give the path of a raw request target, of which no version is named."""
    path = target.partition("?")[0]
    match = _OF_A_MODEL.fullmatch(path)
    return path if match is None else model_path(match["model"]) + match["rest"]


def with_model(target: str, model: str, version: str | None = None) -> str:
    """Put another model into a raw request target; without ``version`` it keeps its own, if any.

    A target that names no model stays as it is.
    """
    path, mark, query = target.partition("?")
    if path == _STATISTICS:
        return target
    if match := _OF_A_MODEL.fullmatch(path):
        kept = match["version"] if version is None else version
        return f"{model_path(model, kept)}{match['rest']}{mark}{query}"
    if match := _LOAD.fullmatch(path):
        return f"{match['room']}/{model}{match['rest']}{mark}{query}"
    return target
