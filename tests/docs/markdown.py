"""The pages of the documentation, taken apart for the tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)

_FENCE = re.compile(r"^(```+)([^\n]*)\n(.*?)^\1 *$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code: its language, its text, and the line at which it begins."""

    language: str
    text: str
    line: int


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        yield Block(found[2].strip(), found[3], text.count("\n", 0, found.start()) + 1)


def prose(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return _FENCE.sub("", page.read_text())


def spans(page: Path) -> Iterator[str]:
    """Yield what stands between single backticks."""
    yield from _SPAN.findall(prose(page))


def links(page: Path) -> Iterator[str]:
    text = _SPAN.sub("", prose(page))
    yield from _LINK.findall(text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them.

    The two differ where punctuation leaves several spaces in a row. Such a heading cannot be
    linked to: it has no anchor here.
    """
    found: set[str] = set()
    for heading in _HEADING.findall(prose(page)):
        plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        github = plain.replace(" ", "-")
        if github == re.sub(r"[\s-]+", "-", plain):
            found.add(github)
    return found
