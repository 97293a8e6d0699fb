"""Operations of the protocol: parsed from method and raw path, and written as paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from urllib.parse import quote, unquote

from gateway.errors import bad_request
from gateway.protocol.json_errors import quote_value
from gateway.sizes import CACHED_HEADS
from gateway.system.bounded_cache import cached


class OperationKind(Enum):
    """The operations of the protocol and its extensions.

    ``word`` is the name that settings use. What ``passes`` is forwarded unchanged.
    """

    INFER = "infer", "infer"
    PREDICT = "prediction of the V1 protocol", "infer"
    GENERATE = "generate", "generate", True
    LIVENESS = "liveness", "health"
    READINESS = "readiness", "health"
    HEALTH = "health", "health", True
    V1_MODEL = "readiness of a model in the V1 protocol", "health"
    SERVER_METADATA = "server metadata", "metadata"
    MODEL_METADATA = "model metadata", "metadata", True
    CONFIG = "config", "config", True
    STATISTICS = "statistics", "statistics", True
    ALL_STATISTICS = "statistics of all models", "statistics"
    REPOSITORY = "repository", "repository", True
    INDEX = "repository index", "repository"
    LOAD = "load or unload", "repository"
    V1_MODELS = "models in the V1 protocol", "repository"
    TRACE_SETTING = "trace setting", "trace"
    LOGGING = "logging", "logging"
    SHARED_MEMORY = "shared memory", "shared_memory", True
    OTHER = "other", "other", True

    def __init__(self, _description: str, word: str, passes: bool = False) -> None:
        self.word = word
        self.passes = passes


_Kind = OperationKind

PASSTHROUGH_IF_SINGLE = frozenset((_Kind.LOGGING, _Kind.INDEX, _Kind.ALL_STATISTICS))
"""Kinds that are forwarded unchanged if only one server has to be queried."""

PASSTHROUGH = frozenset(kind for kind in OperationKind if kind.passes)
"""Kinds that are forwarded unchanged; each other kind has a handler of its own."""

QUERIES = frozenset((_Kind.INDEX,))
"""Kinds that have no effect although clients send them by POST."""

OPERATION_KINDS: Mapping[str, frozenset[OperationKind]] = {
    word: frozenset(kinds) for word, kinds in groupby(OperationKind, lambda kind: kind.word)
}
"""The kinds by the names that settings use."""


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
    "/v2": _Kind.SERVER_METADATA,
    "/v2/": _Kind.SERVER_METADATA,
    "/v2/health/live": _Kind.LIVENESS,
    "/v2/health/ready": _Kind.READINESS,
    "/v2/trace": _Kind.TRACE_SETTING,
    "/v2/trace/setting": _Kind.TRACE_SETTING,
    "/v2/repository/index": _Kind.INDEX,
    _STATISTICS: _Kind.ALL_STATISTICS,
    "/v1/models": _Kind.V1_MODELS,
}
_MODEL_SUBPATHS = {
    "": _Kind.MODEL_METADATA,
    "/infer": _Kind.INFER,
    "/generate": _Kind.GENERATE,
    "/generate_stream": _Kind.GENERATE,
    "/ready": _Kind.HEALTH,
    "/config": _Kind.CONFIG,
    "/stats": _Kind.STATISTICS,
    "/trace": _Kind.TRACE_SETTING,
    "/trace/setting": _Kind.TRACE_SETTING,
}
_V1_MODEL_SUBPATHS = {"": _Kind.V1_MODEL, ":predict": _Kind.PREDICT}
# All paths with these prefixes. Servers serve more of them than the specification has, for example
# Triton /v2/repository/NAME/index, and a denied operation must not be reachable through one.
_BY_PREFIX = {
    "repository": _Kind.REPOSITORY,
    "logging": _Kind.LOGGING,
    "systemsharedmemory": _Kind.SHARED_MEMORY,
    "cudasharedmemory": _Kind.SHARED_MEMORY,
}
# Kinds with a handler of their own, or with an ambiguous path, need one of these methods. With any
# other method the operation is of the kind that follows, which is forwarded.
_METHODS = {
    _Kind.SERVER_METADATA: (("GET",), _Kind.OTHER),
    # Percent-encoded, any path looks like that of a model's metadata: every name may be a model's.
    _Kind.MODEL_METADATA: (("GET", "HEAD"), _Kind.OTHER),
    **dict.fromkeys((_Kind.INFER, _Kind.PREDICT), (("POST",), _Kind.OTHER)),
    **dict.fromkeys((_Kind.V1_MODEL, _Kind.V1_MODELS), (("GET",), _Kind.OTHER)),
    _Kind.TRACE_SETTING: (("GET", "POST"), _Kind.OTHER),
    _Kind.LOAD: (("POST",), _Kind.REPOSITORY),
    _Kind.INDEX: (("GET", "POST"), _Kind.REPOSITORY),
    _Kind.ALL_STATISTICS: (("GET",), _Kind.STATISTICS),
    **dict.fromkeys((_Kind.LIVENESS, _Kind.READINESS), (("GET", "HEAD"), _Kind.HEALTH)),
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
    model, version = operation.model, operation.version
    return Operation(operation.kind, model and unquote(model), version and unquote(version))


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


def _normalize(path: str) -> str:
    """Remove empty and dot segments from a path: RFC 3986, section 5.2.4."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


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
