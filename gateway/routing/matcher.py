"""Which requests a rule is for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate
from typing import Self

from multidict import CIMultiDictProxy

from gateway.protocol.operations import Operation, OperationKind

_EXPRESSION = "re:"
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a name has to look like; ``expression`` is None where it has to be just this text."""

    text: str
    expression: re.Pattern[str] | None = None

    @classmethod
    def of(cls, text: str) -> Self:
        """Read a name, a glob with ``*``, ``?`` and ``[...]``, or ``re:`` and an expression.

        Raises re.error for an expression that is none.
        """
        if text.startswith(_EXPRESSION):
            return cls(text, re.compile(text.removeprefix(_EXPRESSION)))
        return cls(text, re.compile(translate(text)) if _WILD.search(text) else None)

    def fits(self, name: str) -> bool:
        """Tell whether all of a name, in its case, is as it has to be."""
        if self.expression is None:
            return name == self.text
        return self.expression.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Match:
    """What requests have in common; what is None or empty does not count.

    Of a header that is given more than once, one value has to fit.
    """

    model: Pattern | None = None
    version: Pattern | None = None
    headers: tuple[tuple[str, Pattern], ...] = ()
    kinds: frozenset[OperationKind] | None = None

    def holds(self, operation: Operation, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request is one of these."""
        return (
            (self.kinds is None or operation.kind in self.kinds)
            and _fits(self.model, operation.model)
            and _fits(self.version, operation.version)
            and all(
                any(map(pattern.fits, headers.getall(name, ()))) for name, pattern in self.headers
            )
        )


def find_first_match(
    matches: Iterable[Match], operation: Operation, headers: CIMultiDictProxy[str]
) -> int | None:
    """Give the index of the first that a request matches, None if there is none."""
    return next((i for i, match in enumerate(matches) if match.holds(operation, headers)), None)


def _fits(pattern: Pattern | None, name: str | None) -> bool:
    return pattern is None or (name is not None and pattern.fits(name))
