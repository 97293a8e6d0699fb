"""What a request is told that takes no route."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.errors import shorten
from gateway.protocol.operations import OPERATION_KINDS, parse_operation_variants
from gateway.routing.matcher import Match
from gateway.sizes import LISTED_NAMES, QUOTED_TEXT


def unmatched(method: str, target: str, matches: Iterable[Match], with_key: bool) -> str:
    """Say that there is no route, and what the routes with these matches take.

    The words are the same where there is none for who shows a key.
    """
    path = target.partition("?")[0]
    shown = shorten(path, QUOTED_TEXT)
    key = " with this key" if with_key else ""
    several = len(parse_operation_variants(method, target)) > 1
    odd = "; its path can be read in more than one way" if several else ""
    return f"no route for {method} {shown}{key}{odd}{_listed(matches)}"


def _listed(matches: Iterable[Match]) -> str:
    served = [_served(match) for match in matches if match.model or match.version or match.kinds]
    served = list(dict.fromkeys(served))
    if not served:
        return ""
    more = f" and {len(served) - LISTED_NAMES} more" if len(served) > LISTED_NAMES else ""
    return f"; models that are served: {', '.join(served[:LISTED_NAMES])}{more}"


def _served(match: Match) -> str:
    """Say of what models which requests match; of headers, that there have to be some."""
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
