"""Operations of the protocol: parsed from method and raw path, and written as paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from urllib.parse import quote, unquote

from gateway.errors import bad_request
from gateway.protocol.json_errors import quote_value
from gateway.sizes import CACHED_HEADS
from gateway.system.bounded_cache import cached


class OperationKind(Enum):
    """The operations of the protocol and its extensions."""

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
"""Kinds that are forwarded unchanged if only one server has to be queried."""

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
"""Kinds that are forwarded unchanged; each other kind has a handler of its own."""

QUERIES = frozenset((OperationKind.INDEX,))
"""Kinds that have no effect although clients send them by POST."""

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
"""The kinds by the names that settings use."""

_NAMES = {kind: name for name, kinds in OPERATION_KINDS.items() for kind in kinds}


@dataclass(frozen=True, slots=True)
class Operation:
    """What a request asks for; ``model`` and ``version`` are not decoded."""

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


# Raw paths are matched: Triton does not percent-decode model names, so they are sent unchanged.
_MODEL_PATH = re.compile(
    r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?P<rest>|/.*)", re.DOTALL
)
# Triton's path may name a repository.
_LOAD = re.compile(
    r"(?P<prefix>/v2/repository(?:/[^/]+)?/models)/(?P<model>[^/]+)(?P<rest>/(?:un)?load)"
)
# In the V1 protocol the verb follows the last colon; model names may contain colons, too.
_V1_MODEL_PATH = re.compile(
    r"/v1/models/(?P<model>[^/:][^/]*?)(?:/versions/(?P<version>[^/:][^/]*?))?"
    r"(?P<rest>|/.*|:[^/:]*)",
    re.DOTALL,
)
_STATISTICS = "/v2/models/stats"
_SEGMENT = "!$&'()*+,;=:@"
"""Characters of a path segment beside those that are never quoted."""

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
_MODEL_SUBPATHS = {
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
_V1_MODEL_SUBPATHS = {"": OperationKind.V1_MODEL, ":predict": OperationKind.PREDICT}
# All paths with these prefixes. Servers serve more of them than the specification has, for example
# Triton /v2/repository/NAME/index, and a denied operation must not be reachable through one.
_BY_PREFIX = {
    "repository": OperationKind.REPOSITORY,
    "logging": OperationKind.LOGGING,
    "systemsharedmemory": OperationKind.SHARED_MEMORY,
    "cudasharedmemory": OperationKind.SHARED_MEMORY,
}
# Kinds with a handler of their own, or with an ambiguous path, need one of these methods. With any
# other method the operation is of the kind that follows, which is forwarded.
_METHODS = {
    OperationKind.SERVER_METADATA: (("GET",), OperationKind.OTHER),
    # Percent-encoded, any path looks like that of a model's metadata: every name may be a model's.
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


@cached(CACHED_HEADS)
def parse_operation(method: str, target: str) -> Operation:
    """Parse the operation of a request line; an unknown one is OTHER.

    ``target`` is the raw request target, whose query is ignored. Model and version are set for
    every path below ``/v2/models/M`` or ``/v1/models/M``.
    """
    return _parse_path(method, target.partition("?")[0])


@cached(CACHED_HEADS)
def parse_operation_variants(method: str, target: str) -> tuple[Operation, ...]:
    """Parse a request line in each way in which servers read a path; names are decoded.

    The first operation is that of ``parse_operation``. The others are those of servers that decode
    a path before they split it, and of those that normalize it as well. For most paths all are
    equal, and there is only one.
    """
    path = target.partition("?")[0]
    operation = parse_operation(method, target)
    # The expressions of Starlette's routes ignore a line feed at the end of a path.
    decoded = unquote(path).removesuffix("\n")
    others = [other for other in (decoded, _normalize(decoded)) if other != path]
    operations = [decode_names(operation)]
    return tuple(dict.fromkeys(operations + [_parse_path(method, other) for other in others]))


def decode_names(operation: Operation) -> Operation:
    """Return an operation with model and version decoded, as routes match them."""
    return Operation(operation.kind, _decode(operation.model), _decode(operation.version))


def decode_utf8_name(quoted: str, what: str) -> str:
    """Decode a name of a path for protobuf, which has text in UTF-8 alone.

    Raises GatewayError (400), which calls the name ``what``.
    """
    try:
        return unquote(quoted, errors="strict")
    except UnicodeDecodeError:
        raise bad_request(
            f"the path has the {what} {quote_value(quoted)}, which is not UTF-8 when it is "
            "decoded; a server over gRPC can have no such name"
        ) from None


def quote_name(name: str) -> str:
    """Percent-encode a model's name or version so that it is one segment of a path.

    Characters that a segment may have stay (RFC 3986, section 3.3), since Triton does not decode.
    """
    return quote(name, safe=_SEGMENT)


def _parse_path(method: str, path: str) -> Operation:
    model = version = None
    kind = _BY_PATH.get(path)
    if kind is None:
        if match := _MODEL_PATH.fullmatch(path):
            model, version = match["model"], match["version"]
            kind = _MODEL_SUBPATHS.get(match["rest"])
        elif match := _LOAD.fullmatch(path):
            model = match["model"]
            kind = OperationKind.LOAD
        elif match := _V1_MODEL_PATH.fullmatch(path):
            model, version = match["model"], match["version"]
            kind = _V1_MODEL_SUBPATHS.get(match["rest"])
        elif path.startswith("/v2/"):
            kind = _BY_PREFIX.get(path.split("/")[2])
    if kind is None:
        kind = OperationKind.OTHER
    elif kind in _METHODS:
        methods, otherwise = _METHODS[kind]
        kind = kind if method in methods else otherwise
    return Operation(kind, model, version)


def _decode(name: str | None) -> str | None:
    return None if name is None else unquote(name)


def _normalize(path: str) -> str:
    """Remove empty and dot segments from a path: RFC 3986, section 5.2.4."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def operation_name(kind: OperationKind) -> str:
    """Return the name of a kind that settings use."""
    return _NAMES[kind]


def model_path(model: str, version: str | None = None, prefix: str = "/v2") -> str:
    """Return the path of a model's metadata; its other operations are below it."""
    return f"{prefix}/models/{model}" + (f"/versions/{version}" if version is not None else "")


def infer_path(operation: Operation) -> str:
    """Return the path of inference by the model of an operation."""
    return model_path(operation.model or "", operation.version) + "/infer"


def strip_version(target: str) -> str:
    """Return the path of a raw request target without the model's version."""
    path = target.partition("?")[0]
    match = _MODEL_PATH.fullmatch(path) or _V1_MODEL_PATH.fullmatch(path)
    return path if match is None else model_path(match["model"], None, path[:3]) + match["rest"]


def replace_model(target: str, model: str, version: str | None = None) -> str:
    """Replace the model of a raw request target, and its version if one is given.

    A target without a model stays unchanged.
    """
    path, separator, query = target.partition("?")
    if path == _STATISTICS:
        return target
    if match := _MODEL_PATH.fullmatch(path) or _V1_MODEL_PATH.fullmatch(path):
        version = match["version"] if version is None else version
        return f"{model_path(model, version, path[:3])}{match['rest']}{separator}{query}"
    if match := _LOAD.fullmatch(path):
        return f"{match['prefix']}/{model}{match['rest']}{separator}{query}"
    return target
