"""Route matching: which requests a route is for, and the error for one that matches none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate
from typing import Self

from multidict import CIMultiDictProxy

from gateway.errors import shorten
from gateway.protocol.operations import (
    OPERATION_KINDS,
    Operation,
    OperationKind,
    parse_operation_variants,
)
from gateway.sizes import LISTED_NAMES, QUOTED_TEXT

_REGEX_PREFIX = "re:"
_WILDCARD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern for a name; ``regex`` is None for a literal text."""

    text: str
    regex: re.Pattern[str] | None = None

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse a name, a glob with ``*``, ``?`` and ``[...]``, or ``re:`` and an expression.

        Raises re.error for an invalid expression.
        """
        if text.startswith(_REGEX_PREFIX):
            return cls(text, re.compile(text.removeprefix(_REGEX_PREFIX)))
        return cls(text, re.compile(translate(text)) if _WILDCARD.search(text) else None)

    def matches(self, name: str) -> bool:
        """Tell whether the whole name matches; case counts."""
        if self.regex is None:
            return name == self.text
        return self.regex.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Match:
    """The conditions of a route; None or an empty one matches every request.

    Of a header that is given more than once, one value has to match.
    """

    model: Pattern | None = None
    version: Pattern | None = None
    headers: tuple[tuple[str, Pattern], ...] = ()
    kinds: frozenset[OperationKind] | None = None

    def matches(self, operation: Operation, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request meets all conditions."""
        return (
            (self.kinds is None or operation.kind in self.kinds)
            and _matches(self.model, operation.model)
            and _matches(self.version, operation.version)
            and all(
                any(map(pattern.matches, headers.getall(name, ())))
                for name, pattern in self.headers
            )
        )


def find_first_match(
    matches: Iterable[Match], operation: Operation, headers: CIMultiDictProxy[str]
) -> int | None:
    """Return the index of the first match for a request; None without one."""
    return next((i for i, match in enumerate(matches) if match.matches(operation, headers)), None)


def _matches(pattern: Pattern | None, name: str | None) -> bool:
    return pattern is None or (name is not None and pattern.matches(name))


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
