"""Method and raw path ↔ what a request asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class EndpointKind(Enum):
    """The endpoints of the protocol that the gateway treats in a way of their own."""

    SERVER_METADATA = "server metadata"
    INFER = "infer"
    TRACE_SETTING = "trace setting"
    LOAD = "load or unload"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a request asks for; ``model`` and ``version`` as they stand in the raw path."""

    kind: EndpointKind
    model: str | None = None
    version: str | None = None


_OTHER = Endpoint(EndpointKind.OTHER)

# Raw paths are matched: Triton does not percent-decode model names, so neither do we.
_MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
_INFER = re.compile(_MODEL + r"/infer")
_TRACE = re.compile(rf"(?:/v2|{_MODEL})/trace(?:/setting)?")
_LOAD = re.compile(r"/v2/repository/models/(?P<model>[^/]+)/(?:un)?load")


@lru_cache(maxsize=256)
def parse_endpoint(method: str, target: str) -> Endpoint:
    """Tell what a request line asks for; whatever is not known is OTHER and is forwarded.

    ``target`` is the raw request target; its query does not count.
    """
    path = target.partition("?")[0]
    if method == "POST":
        if match := _INFER.fullmatch(path):
            return Endpoint(EndpointKind.INFER, match["model"], match["version"])
        if match := _LOAD.fullmatch(path):
            return Endpoint(EndpointKind.LOAD, match["model"])
    if method == "GET" and path in ("/v2", "/v2/"):
        return Endpoint(EndpointKind.SERVER_METADATA)
    if method in ("GET", "POST") and (match := _TRACE.fullmatch(path)):
        return Endpoint(EndpointKind.TRACE_SETTING, match["model"], match["version"])
    return _OTHER


def model_path(model: str, version: str | None = None) -> str:
    """Give the path of a model's metadata; other endpoints of the model lie below it."""
    return f"/v2/models/{model}" + (f"/versions/{version}" if version is not None else "")
