"""The content codings of HTTP, and which one a body has."""

from __future__ import annotations

from multidict import MultiMapping

from gateway.errors import ErrorKind, GatewayError

CODINGS = ("gzip", "deflate")
"""The content codings that are known here; RFC 9110, section 8.4.1."""

_SHOWN = 60
"""Characters of a header that an error repeats."""


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
    said = ", ".join(headers.getall("Content-Encoding"))[:_SHOWN]
    raise GatewayError(
        ErrorKind.UNSUPPORTED_ENCODING,
        f"the request's Content-Encoding is {said!r}; one of {', '.join(CODINGS)} is taken, "
        "or none",
    )


def _applied(headers: MultiMapping[str]) -> list[str]:
    """Name the codings that a body has, in order and lower case; no coding is not named alone."""
    said = ",".join(headers.getall("Content-Encoding", ()))
    names = [name for each in said.split(",") if (name := each.strip().lower())]
    return [] if names == ["identity"] else names


def _known_as(name: str) -> str:
    """Give the name of a coding; RFC 9110, section 8.4.1.3, has an older one for gzip."""
    return "gzip" if name == "x-gzip" else name
