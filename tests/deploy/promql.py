"""Find what PromQL expressions use: metrics, and labels of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
# A name that is not called as a function, and the labels that it is chosen by.
_SELECTOR = re.compile(r"\b([A-Za-z_]\w*)\b(?!\s*\()\s*(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_WORDS = {"and", "or", "unless", "bool", "offset"}


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric in an expression, and the labels by which its series are chosen."""

    metric: str
    labels: frozenset[str]


@dataclass(frozen=True, slots=True)
class Expression:
    """What an expression uses."""

    selectors: tuple[Selector, ...]
    grouping: frozenset[str]
    """Labels that it groups or joins by."""

    @property
    def metrics(self) -> set[str]:
        """Return the names of the metrics."""
        return {each.metric for each in self.selectors}


def read_expression(text: str) -> Expression:
    """Read an expression that is known to be valid, also one with variables of Grafana."""
    plain = _TEXT.sub("", text)
    lists = _GROUPING.findall(plain)
    grouping = {label.strip() for each in lists for label in each.split(",")}
    rest = _RANGE.sub("", _GROUPING.sub("", plain))
    selectors = tuple(
        Selector(name, frozenset(_LABEL.findall(labels)))
        for name, labels in _SELECTOR.findall(rest)
        if name not in _WORDS
    )
    return Expression(selectors, frozenset(grouping - {""}))
