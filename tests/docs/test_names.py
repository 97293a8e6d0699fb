"""What the documentation names is there: files, what they define, settings and metrics."""

from __future__ import annotations

import os
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from docs.generate_settings import PAGE, Setting, anchor, page, sections
from gateway.errors import ErrorKind
from tests.docs.markdown import PAGES, ROOT, anchors, name, spans

_SUFFIXES = r"(?:py|c|md|toml|service|json|yaml|yml)"
_FILE = re.compile(rf"([\w.-]+/)*[\w.-]+\.{_SUFFIXES}(:[\w.]+)?")
_FOLDER = re.compile(r"([\w.-]+/)+")
_SETTING = re.compile(r"[a-z_]+(\[\])?(\.[\w*-]+(\[\])?)+")
_METRIC = re.compile(r"tensorgate_[a-z0-9_]+")
_PLACES = (ROOT, ROOT / "gateway", ROOT / "docs")


def _found(path: str) -> Path | None:
    return next((place / path for place in _PLACES if (place / path).exists()), None)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_and_folder_that_a_page_names_exists(page: Path) -> None:
    """Files are named from the root, or from gateway/; those of users have no folder."""
    named = {span.partition(":")[0] for span in spans(page) if _FILE.fullmatch(span)}
    named |= {span for span in spans(page) if _FOLDER.fullmatch(span)}
    missing = {path for path in named if "/" in path and _found(path) is None}
    assert not missing
    # A file of Python without a folder is one of this project.
    alone = {path for path in named if "/" not in path and path.endswith((".py", ".c"))}
    assert alone <= _sources()


@cache
def _sources() -> set[str]:
    """Return the names of the project's own files of source code."""
    names: set[str] = set()
    for _, folders, files in os.walk(ROOT):
        # Hidden folders hold the files of others: .venv and .cache.
        folders[:] = [each for each in folders if not each.startswith(".")]
        names.update(each for each in files if each.endswith((".py", ".c")))
    return names


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_definition_that_a_page_names_stands_in_its_file(page: Path) -> None:
    """A recipe names what is to be touched as `path.py:Class.method`."""
    named = {span for span in spans(page) if _FILE.fullmatch(span) and ".py:" in span}
    assert not {span for span in named if not _is_defined(span)}


def _is_defined(span: str) -> bool:
    path, _, names = span.partition(":")
    file = _found(path)
    text = file.read_text() if file is not None else ""
    patterns = (rf"\b(def|class) {each}\b|^ *{each}\b.*[:=]" for each in names.split("."))
    return all(re.search(pattern, text, re.MULTILINE) for pattern in patterns)


@cache
def _known_settings() -> set[str]:
    known = set()
    for section in sections():
        known |= {section.path} | {setting.path for setting in section.settings}
    return {path.replace("[]", "") for path in known}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_setting_that_a_page_names_is_one(page: Path) -> None:
    """A name chosen by the operator stands as NAME, or as *."""
    known = _known_settings()
    tops = {path.partition(".")[0] for path in known if "." in path} - {""}
    unknown = []
    for span in spans(page):
        path = span.partition(":")[0].replace("*", "NAME").replace("[]", "")
        if _SETTING.fullmatch(path) and path.partition(".")[0] in tops and path not in known:
            unknown.append(span)
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_metric_that_a_page_names_is_one(page: Path) -> None:
    """The table of metrics has all of them: tests/observe/test_call_metrics.py."""
    table = (ROOT / "docs" / "guide" / "metrics.md").read_text()
    known = set(re.findall(r"^\| `(tensorgate_\w+)`", table, re.MULTILINE))
    named = set(_METRIC.findall(page.read_text()))
    assert {re.sub("_(bucket|sum|count)$", "", each) for each in named} <= known


def test_every_dependency_is_named_with_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = {
        each.lower()
        for requirement in [*project["dependencies"], *(each for extra in extras for each in extra)]
        for each in re.findall(r"^[\w-]+", requirement)
    }
    rows = re.findall(r"^\| ([\w, -]+) \| [^|]+ \| [^|]+ \|$", _libraries(), re.MULTILINE)
    assert wanted <= {each.strip().lower() for row in rows for each in row.split(",")}


def _libraries() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text.partition("## Libraries")[2]


def test_the_page_on_troubleshooting_has_every_status_of_an_error() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    told = {int(each) for each in re.findall(r"^\| (\d{3})\b", text, re.MULTILINE)}
    assert {kind.value.status for kind in ErrorKind} <= told


def test_contributing_has_every_target_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)) - {"help"}
    told = set(re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert targets <= told


SETTINGS = [setting for section in sections() for setting in section.settings]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)
def test_every_setting_has_a_description_a_type_and_a_default(setting: Setting) -> None:
    assert setting.description.endswith((".", "?", ")"))
    assert len(setting.description.split()) > 1
    assert setting.kind
    assert setting.default


def test_every_section_has_a_heading_that_can_be_linked_to() -> None:
    titles = [section.path for section in sections() if section.path]
    assert {anchor(title) for title in titles} <= anchors(PAGE)
    assert len({anchor(title) for title in titles}) == len(titles)
