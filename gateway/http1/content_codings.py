"""HTTP content codings: of a request body, and accepted by a client."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from multidict import MultiMapping

from gateway.errors import ErrorKind, GatewayError
from gateway.sizes import QUOTED_NAME

CODINGS: Final = ("gzip", "deflate")
"""The supported content codings; RFC 9110, section 8.4.1."""

_MAX_ELEMENTS: Final = 32
"""Elements of an Accept-Encoding that count."""

# RFC 9110, section 12.4.2.
_WEIGHT: Final = re.compile(r"[qQ]=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")


def is_encoded(headers: MultiMapping[str]) -> bool:
    """Tell whether a body has a content coding."""
    return "Content-Encoding" in headers and bool(_applied_codings(headers))


def content_coding(headers: MultiMapping[str]) -> str | None:
    """Return the content coding of a body; None without one.

    Raises GatewayError (415) for an unknown coding, and for several codings.
    """
    applied = _applied_codings(headers)
    if not applied:
        return None
    coding = _canonical_name(applied[0])
    if len(applied) == 1 and coding in CODINGS:
        return coding
    quoted = ", ".join(headers.getall("Content-Encoding"))[:QUOTED_NAME]
    raise GatewayError(
        ErrorKind.UNSUPPORTED_ENCODING,
        f"the request's Content-Encoding is {quoted!r}; use {', '.join(CODINGS)}, or none",
    )


def accepted_coding(headers: MultiMapping[str], offered: Sequence[str]) -> str | None:
    """Return the offered coding that a client prefers, the first of equals; None for no coding.

    None also if the client accepts none of them, or has no Accept-Encoding: RFC 9110, section
    12.5.3.
    """
    if "Accept-Encoding" not in headers:
        return None
    weights: dict[str, float] = {}
    elements = ",".join(headers.getall("Accept-Encoding")).split(",", _MAX_ELEMENTS)
    for element in elements[:_MAX_ELEMENTS]:
        name, _, weight = element.partition(";")
        if name := name.strip().lower():
            weights[_canonical_name(name)] = _parse_weight(weight.strip())
    default = weights.get("*", 0.0)
    best = max(offered, key=lambda coding: weights.get(coding, default), default="identity")
    weight_of_best = weights.get(best, default)
    return best if weight_of_best > 0 and weight_of_best >= weights.get("identity", 0.0) else None


def _applied_codings(headers: MultiMapping[str]) -> list[str]:
    """List the codings of a body in order, in lower case; "identity" alone is none."""
    value = ",".join(headers.getall("Content-Encoding", ()))
    names = [name for each in value.split(",") if (name := each.strip().lower())]
    return [] if names == ["identity"] else names


def _canonical_name(name: str) -> str:
    """Return the name of a coding; RFC 9110, section 8.4.1.3, has an older one for gzip."""
    return "gzip" if name == "x-gzip" else name


def _parse_weight(text: str) -> float:
    """Parse a weight; an invalid one means that the coding is not accepted."""
    if not text:
        return 1.0
    match = _WEIGHT.fullmatch(text)
    return float(match[1]) if match else 0.0
