"""The log lines of docs/guide/incidents.md, to compare with those that incidents produce."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.docs.markdown import blocks

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "incidents.md"

_VARIABLE = (
    (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME"),
    (r"\b[0-9a-f]{32} \S+ ", "ID UPSTREAM "),
    (r"\b[0-9a-f]{32}\b", "ID"),
    (r"http://[\d.:]+\d", "URL"),
    (r"(?<=of upstream )\S+", "UPSTREAM"),
    (r"(?<= slots of )\w+", "UPSTREAM"),
    (r"(?<= )/\S+/[\w.]+", "FILE"),
    (r"(tensorgate[.\w]*)\[\d+\]", r"\1"),
    (r"\d+(\.\d+)?", "0"),
    (r"\b0 (ms|s|min)\b", "0 UNITS"),
)


def normalized(line: str) -> str:
    """Replace what differs from run to run: times, ids, addresses, files and numbers."""
    for pattern, replacement in _VARIABLE:
        line = re.sub(pattern, replacement, line)
    return line


@cache
def shown_lines() -> frozenset[str]:
    """Return the lines that the page shows, normalized."""
    logs = [block.text for block in blocks(PAGE) if not block.language]
    return frozenset(normalized(line) for log in logs for line in log.splitlines())


@cache
def _text() -> str:
    return normalized(" ".join(PAGE.read_text().split()))


def is_quoted(sentence: str) -> bool:
    """Tell whether the page quotes a sentence like this one."""
    return f'"{normalized(sentence)}"' in _text()


def is_shown(line: str) -> bool:
    """Tell whether the page shows a line like this one."""
    return normalized(line) in shown_lines()
