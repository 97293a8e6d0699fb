"""The error message for a request that matches no route."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.errors import shorten
from gateway.protocol.operations import OPERATION_KINDS, parse_operation_variants
from gateway.routing.matcher import Match
from gateway.sizes import LISTED_NAMES, QUOTED_TEXT


def not_found_text(method: str, target: str, matches: Iterable[Match], with_key: bool) -> str:
    """Say that there is no route, and list what the routes with these matches serve.

    The text is the same if there is a route that the client's key does not open.
    """
    path = shorten(target.partition("?")[0], QUOTED_TEXT)
    key = " with this key" if with_key else ""
    is_ambiguous = len(parse_operation_variants(method, target)) > 1
    ambiguous = "; its path can be read in more than one way" if is_ambiguous else ""
    return f"no route for {method} {path}{key}{ambiguous}{_list_served(matches)}"


def _list_served(matches: Iterable[Match]) -> str:
    texts = [_describe(match) for match in matches if match.model or match.version or match.kinds]
    served = list(dict.fromkeys(texts))
    if not served:
        return ""
    more = f" and {len(served) - LISTED_NAMES} more" if len(served) > LISTED_NAMES else ""
    return f"; models that are served: {', '.join(served[:LISTED_NAMES])}{more}"


def _describe(match: Match) -> str:
    """Describe the requests that match; of headers, only that some are required."""
    parts = [match.model.text if match.model else "any"]
    if match.version:
        parts.append(f"version {match.version.text}")
    if match.headers:
        parts.append("with certain headers")
    if match.kinds:
        words = [
            word for word, kinds in OPERATION_KINDS.items() if not kinds.isdisjoint(match.kinds)
        ]
        parts.append(f"({', '.join(words)})")
    return " ".join(parts)
