"""Links of README, CONTRIBUTING and docs/ lead somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import PAGES, ROOT, anchors, links, name

_ELSEWHERE = ("https://", "http://", "mailto:")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    dead = []
    for link in links(page):
        if link.startswith(_ELSEWHERE):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_of_the_site_link_to_nothing_outside_it(page: Path) -> None:
    """MkDocs serves the folder docs/ alone: files elsewhere are named, not linked."""
    if page.parent == ROOT:
        return
    docs = ROOT / "docs"
    local = [link.partition("#")[0] for link in links(page) if not link.startswith(_ELSEWHERE)]
    outside = [link for link in local if docs not in (page.parent / link).resolve().parents]
    assert not [link for link in outside if link]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        local = (link.partition("#")[0] for link in links(page) if "://" not in link)
        waiting += [
            target
            for link in local
            if link.endswith(".md") and (target := (page.parent / link).resolve()).exists()
        ]
    assert set(PAGES) <= reached


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """MkDocs takes dead links, and pages that the navigation lacks, for errors."""
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "settings.html").exists()
