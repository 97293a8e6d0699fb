"""The queries that the documentation shows ask for metrics that the gateway has."""

from __future__ import annotations

import re

import pytest

from tests.docs.markdown import PAGES, ROOT, Block, blocks, name, prose

_METRIC = re.compile(r"\b(?:tensorgate|process)_[a-z0-9_]+")
_PARTS = ("_bucket", "_count", "_sum")

QUERIES = [
    pytest.param(block, id=f"{name(page)}:{block.line}")
    for page in PAGES
    for block in blocks(page)
    if block.language == "promql"
]


@pytest.mark.parametrize("block", QUERIES)
def test_every_metric_of_a_query_is_on_the_page_on_metrics(block: Block) -> None:
    page = ROOT / "docs" / "guide" / "metrics.md"
    known = set(re.findall(r"^\| `(\w+)` \|", prose(page), re.MULTILINE))
    asked = set(_METRIC.findall(block.text))
    histograms = {each + part for each in known for part in _PARTS if each.endswith("_seconds")}
    assert asked
    assert asked <= known | histograms


@pytest.mark.parametrize("block", QUERIES)
def test_every_label_of_a_query_is_one_of_its_metrics(block: Block) -> None:
    page = ROOT / "docs" / "guide" / "metrics.md"
    row = re.compile(r"^\| `(\w+)` \| \w+ \| ([\w, ]*) \|", re.MULTILINE)
    labels = {
        found[0]: set(filter(None, found[1].split(", "))) for found in row.findall(prose(page))
    }
    allowed = {"le", "instance"}
    for metric in _METRIC.findall(block.text):
        allowed |= labels.get(metric) or labels.get(metric.rpartition("_")[0]) or set()
    grouped = re.findall(r"\b(?:by|on|ignoring) \(([\w, ]+)\)", block.text)
    asked = {label for group in grouped for label in group.split(", ")}
    asked |= set(re.findall(r'(\w+)[=!]~?"', block.text))
    assert asked <= allowed
