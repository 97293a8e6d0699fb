"""The content codings of HTTP: which one a body has, and which one a client takes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from multidict import MultiMapping

from gateway.errors import ErrorKind, GatewayError
from gateway.sizes import QUOTED_NAME

CODINGS = ("gzip", "deflate")
"""The content codings that are known here; RFC 9110, section 8.4.1."""

_LOOKED_AT = 32
"""Elements of a client's list that count."""

# RFC 9110, section 12.4.2.
_WEIGHT = re.compile(r"[qQ]=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")


def encoded(headers: MultiMapping[str]) -> bool:
    """Tell whether a body is compressed."""
    return "Content-Encoding" in headers and bool(_applied(headers))


def content_coding(headers: MultiMapping[str]) -> str | None:
    """Give the coding of a body; None where it has none.

    Raises GatewayError (415) for one that is not known, and for several, one in the other.
    """
    applied = _applied(headers)
    if not applied:
        return None
    coding = _known_as(applied[0])
    if len(applied) == 1 and coding in CODINGS:
        return coding
    said = ", ".join(headers.getall("Content-Encoding"))[:QUOTED_NAME]
    raise GatewayError(
        ErrorKind.UNSUPPORTED_ENCODING,
        f"the request's Content-Encoding is {said!r}; one of {', '.join(CODINGS)} is taken, "
        "or none",
    )


def accepted_coding(headers: MultiMapping[str], offered: Sequence[str]) -> str | None:
    """Give the coding that a client likes best of those offered, the first of equals; or None.

    None is for the body as it is: also where nothing that is offered is accepted, and where the
    client says nothing. RFC 9110, section 12.5.3.
    """
    if "Accept-Encoding" not in headers:
        return None
    weights: dict[str, float] = {}
    said = ",".join(headers.getall("Accept-Encoding"))
    for element in said.split(",", _LOOKED_AT)[:_LOOKED_AT]:
        name, _, weight = element.partition(";")
        if name := name.strip().lower():
            weights[_known_as(name)] = _weight(weight.strip())
    of_others = weights.get("*", 0.0)
    best = max(offered, key=lambda coding: weights.get(coding, of_others), default="identity")
    weight_of_best = weights.get(best, of_others)
    return best if weight_of_best > 0 and weight_of_best >= weights.get("identity", 0.0) else None


def _applied(headers: MultiMapping[str]) -> list[str]:
    """Name the codings that a body has, in order and lower case; no coding is not named alone."""
    said = ",".join(headers.getall("Content-Encoding", ()))
    names = [name for each in said.split(",") if (name := each.strip().lower())]
    return [] if names == ["identity"] else names


def _known_as(name: str) -> str:
    """Give the name of a coding; RFC 9110, section 8.4.1.3, has an older one for gzip."""
    return "gzip" if name == "x-gzip" else name


def _weight(text: str) -> float:
    """Read a weight; one that is none is that of a coding which is not taken."""
    if not text:
        return 1.0
    match = _WEIGHT.fullmatch(text)
    return float(match[1]) if match else 0.0
