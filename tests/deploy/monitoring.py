"""Read the dashboard, the alert rules, their PromQL, and the page that lists the metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.deploy.files import DEPLOY, ROOT, Document, documents

PAGE = ROOT / "docs" / "guide" / "metrics.md"
DASHBOARD = DEPLOY / "grafana" / "tensorgate.json"
PROMETHEUS = DEPLOY / "prometheus"
ALERTS = PROMETHEUS / "alerts.yaml"

_ROW = re.compile(
    r"^\| `((?:tensorgate|process)_\w+)` \| (counter|gauge|histogram) \|([^|]*)\|", re.MULTILINE
)
_SUFFIXES = {
    "counter": {"": set[str]()},
    "gauge": {"": set[str]()},
    "histogram": {"_bucket": {"le"}, "_sum": set[str](), "_count": set[str]()},
}
"""The series of each type of metric, and the labels that they have beside its own."""
_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")

SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""


_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
# A name that is not called as a function, and the labels that it is chosen by.
_SELECTOR = re.compile(r"\b([A-Za-z_]\w*)\b(?!\s*\()\s*(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_WORDS = {"and", "or", "unless", "bool", "offset"}


def documented_series() -> dict[str, set[str]]:
    """Return the labels of all series that the page on metrics lists, by the series' name."""
    found: dict[str, set[str]] = {}
    for name, kind, text in _ROW.findall(PAGE.read_text()):
        labels = {label.strip(" `") for label in text.split(",")} - {""}
        for suffix, more in _SUFFIXES[kind].items():
            found[name + suffix] = labels | more
    return found


@dataclass(frozen=True, slots=True)
class Query:
    """A query of the dashboard: where it stands, and how its series are named."""

    place: str
    text: str
    legend: str


class Dashboard:
    """The dashboard for Grafana."""

    def __init__(self) -> None:
        self.document: Document = json.loads(DASHBOARD.read_text())

    @property
    def panels(self) -> list[Document]:
        """Return all panels but the rows."""
        return [each for each in self.document["panels"] if each["type"] != "row"]

    @property
    def variables(self) -> dict[str, Document]:
        """Return the variables by name."""
        return {each["name"]: each for each in self.document["templating"]["list"]}

    def queries(self) -> Iterator[Query]:
        """Yield the queries of all panels and annotations."""
        for panel in self.panels:
            for target in panel["targets"]:
                yield Query(panel["title"], target["expr"], target["legendFormat"])
        for each in self.document["annotations"]["list"]:
            yield Query(each["name"], each["expr"], each["textFormat"])

    def label_values(self) -> Iterator[tuple[str, str, str]]:
        """Yield the name of each variable of labels, the series that it is about, and the label."""
        for name, variable in self.variables.items():
            if variable["type"] == "query":
                found = _LABEL_VALUES.fullmatch(variable["query"]["query"])
                assert found is not None, variable
                yield name, found[1], found[2]


def alert_rules() -> list[dict[str, Any]]:
    """Return the alert rules."""
    (document,) = documents(ALERTS)
    return [rule for group in document["groups"] for rule in group["rules"]]


def adapter_rule() -> Document:
    """Return the rule by which prometheus-adapter makes the autoscaler's metric."""
    (values,) = documents(PROMETHEUS / "adapter.yaml")
    (rule,) = values["rules"]["external"]
    return dict(rule)


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
