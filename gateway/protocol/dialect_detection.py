"""Server metadata (``GET /v2``): the dialect that it shows, and that of several servers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway.errors import shorten
from gateway.protocol.dialects import BINARY, JSON, KSERVE, MLSERVER, OPENVINO, TRITON, Dialect
from gateway.sizes import QUOTED_NAME

_BINARY_EXTENSION = "binary_tensor_data"
_SHARED_MEMORY_EXTENSION = "system_shared_memory"

# Only Triton lists all of these. Its name says nothing, as operators can set it (`--id`).
_TRITON_EXTENSIONS = frozenset(
    (_BINARY_EXTENSION, "model_configuration", "schedule_policy", "sequence")
)

# The first releases that take binary tensors and respond with them. Neither lists the extension.
_BINARY_SINCE = {"kserve": (KSERVE, (0, 14)), "OpenVINO Model Server": (OPENVINO, (2022, 3))}

# The releases before it release the state of a cancelled gRPC call twice: pull requests 7840, 8078
# and 8220 of triton-inference-server/server.
_TRITON_SURVIVES_CANCELLATION_SINCE = (2, 59)

_RELEASE = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class DetectedDialect:
    """The dialect of a server, and the reason, in words that follow the server's URL.

    Without ``certain`` the server showed nothing. It may turn out to be another, for example a
    placeholder that responds while the real server starts.
    """

    dialect: Dialect
    reason: str
    certain: bool = True
    lists_shared_memory: bool = False
    """Whether system shared memory is among its extensions."""


def parse_server_metadata(status: int, document: bytes) -> DetectedDialect:
    """Detect the dialect from a response to ``GET /v2``; JSON unless it shows binary tensors."""
    if status != 200:
        return _unknown(f"returned {status} to GET /v2")
    try:
        fields = orjson.loads(document)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return _unknown("returned no JSON object to GET /v2")
    lists_shared_memory = _SHARED_MEMORY_EXTENSION in _extensions(fields)
    return replace(_by_fields(fields), lists_shared_memory=lists_shared_memory)


def _by_fields(fields: Mapping[str, Any]) -> DetectedDialect:
    name, version = _text(fields.get("name")), _text(fields.get("version"))
    extensions = frozenset(each for each in _extensions(fields) if isinstance(each, str))
    who = f"names itself {_shown(name)}" if name else "has no name"
    who += f", version {_shown(version)}" if version else ""
    if _BINARY_EXTENSION in extensions:
        return _with_binary(name, version, who, extensions)
    if name in _BINARY_SINCE:
        return _by_release(name, who, version)
    if name == "mlserver":
        return DetectedDialect(MLSERVER, f"{who}: it takes JSON alone over HTTP")
    return _unknown(f"{who} and lists no {_BINARY_EXTENSION} among its extensions")


def _with_binary(name: str, version: str, who: str, extensions: frozenset[str]) -> DetectedDialect:
    if name == TRITON.name or extensions >= _TRITON_EXTENSIONS:
        # A Triton without tracing, by build or by age, does not list it.
        dialect = TRITON if "trace" in extensions else replace(TRITON, trace=None)
        if (_release(version) or (0, 0)) >= _TRITON_SURVIVES_CANCELLATION_SINCE:
            dialect = replace(dialect, grpc=replace(dialect.grpc, survives_cancellation=True))
        return DetectedDialect(dialect, f"{who} and lists the extensions of Triton")
    if name in _BINARY_SINCE:
        return DetectedDialect(_BINARY_SINCE[name][0], f"{who} and lists {_BINARY_EXTENSION}")
    dialect = replace(
        BINARY,
        has_config="model_configuration" in extensions,
        # Clients of the trace extension are Triton's, so it must have Triton's paths.
        trace=TRITON.trace if "trace" in extensions else None,
    )
    return DetectedDialect(dialect, f"{who} and lists {_BINARY_EXTENSION}")


def _by_release(name: str, who: str, version: str) -> DetectedDialect:
    dialect, since = _BINARY_SINCE[name]
    release = _release(version)
    if release is None:
        return _unknown(f"{who}, which is no release's")
    if release < since:
        older = replace(dialect, binary=False, binary_only_if_listed=False)
        return DetectedDialect(
            older, f"{who}: it takes the binary form since {since[0]}.{since[1]}"
        )
    return DetectedDialect(dialect, who)


def _release(version: str) -> tuple[int, int] | None:
    match = _RELEASE.match(version)
    return None if match is None else (int(match[1]), int(match[2]))


def _unknown(what: str) -> DetectedDialect:
    return DetectedDialect(
        JSON, f"{what}: nothing shows that it takes the binary form", certain=False
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _shown(text: str) -> str:
    return ascii(shorten(text, QUOTED_NAME))


def add_binary_extension(document: bytes) -> bytes:
    """List the binary extension in a server's metadata; anything else stays as it is."""
    try:
        fields = orjson.loads(document)
        extensions = fields.setdefault("extensions", [])
        if _BINARY_EXTENSION in extensions:
            return document
        extensions.append(_BINARY_EXTENSION)
    except (ValueError, AttributeError, TypeError):
        return document
    return orjson.dumps(fields)


def merge_server_metadata(servers: Sequence[Mapping[str, Any]]) -> bytes:
    """Write the first server's metadata with the extensions of all, and the binary one."""
    first, *others = [_extensions(fields) for fields in servers]
    shared = [name for name in first if all(name in extensions for extensions in others)]
    if _BINARY_EXTENSION not in shared:
        shared.append(_BINARY_EXTENSION)
    return orjson.dumps({**servers[0], "extensions": shared})


def _extensions(fields: Mapping[str, Any]) -> list[Any]:
    """Return a server's extensions; some servers list none."""
    extensions = fields.get("extensions")
    return extensions if isinstance(extensions, list) else []
