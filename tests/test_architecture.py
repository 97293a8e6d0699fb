"""The house: imports point down, without a circle, and rooms stay small."""

from __future__ import annotations

import ast
import graphlib
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.support.compiled import needs_source

ROOT = Path(__file__).parents[1]

pytestmark = needs_source

FLOORS = [
    "__main__",
    "cli",
    "top",
    "demo",
    "app",
    "admin",
    "listener",
    "proxy",
    "offload",
    "upstream",
    "build_info",
    "codec",
    "observe",
    "routing",
    "protocol",
    "settings",
    "workers",
    "http2",
    "http1",
    "system",
    "errors",
    "sizes",
]
"""The packages from top to bottom: each imports only those below it."""

MOST_FILES = 16
"""Python files in a folder: more than that cannot be seen at a glance."""


@cache
def modules() -> Mapping[str, Path]:
    """Give the files of the package by their dotted names."""
    return {_dotted(path): path for path in sorted((ROOT / "gateway").rglob("*.py"))}


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Give the modules of the package that each module imports, for types only too."""
    return {name: frozenset(_imported(path)) for name, path in modules().items()}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [_target(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        yield from (name for name in names if name in modules() and name != _dotted(path))


def _target(module: str, name: str) -> str:
    """Give the module that is imported: ``from package import module`` names it last."""
    return f"{module}.{name}" if f"{module}.{name}" in modules() else module


def rooms(package: str) -> Mapping[str, frozenset[str]]:
    """Give the rooms of a package that each of its rooms imports."""
    depth = package.count(".") + 1
    found: dict[str, set[str]] = {}
    for name, targets in imports().items():
        if not name.startswith(f"{package}."):
            continue
        own = name.split(".")[depth]
        inside = {each.split(".")[depth] for each in targets if each.startswith(f"{package}.")}
        found.setdefault(own, set()).update(inside - {own})
    return {room: frozenset(targets) for room, targets in found.items()}


def packages() -> list[str]:
    """Give the dotted names of all packages."""
    return [name for name, path in modules().items() if path.name == "__init__.py"]


def test_floors_import_only_floors_below_them() -> None:
    upward = {
        f"{floor} imports {target}"
        for floor, targets in rooms("gateway").items()
        for target in targets
        if FLOORS.index(target) <= FLOORS.index(floor)
    }
    assert upward == set()


@pytest.mark.parametrize("package", packages())
def test_no_rooms_import_each_other_in_a_circle(package: str) -> None:
    # Raises CycleError, which names the circle.
    graphlib.TopologicalSorter(rooms(package)).prepare()


def test_no_modules_import_each_other_in_a_circle() -> None:
    # Raises CycleError, which names the circle.
    graphlib.TopologicalSorter(imports()).prepare()


@pytest.mark.parametrize("folder", ["gateway", "tests", "benchmarks"])
def test_no_folder_has_too_many_files(folder: str) -> None:
    counts = Counter(path.parent for path in (ROOT / folder).rglob("*.py"))
    crowded = {str(path.relative_to(ROOT)): count for path, count in counts.items()}
    assert {path: count for path, count in crowded.items() if count > MOST_FILES} == {}


def test_no_compiled_module_lies_beside_the_sources() -> None:
    """Python would import it, whatever the sources say: `make clean` removes it."""
    assert not list((ROOT / "gateway").rglob("*.so"))


def compiled_files() -> list[str]:
    """Give the files that mypyc compiles, by the rules of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rules = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["mypyc"]
    files: list[str] = runpy.run_path(str(ROOT / "hatch_build.py"))["compiled_modules"](ROOT, rules)
    return files


SUSPENDS = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def suspensions(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Give the lines of one function at which it can be suspended."""
    for node in nodes:
        if isinstance(node, SUSPENDS):
            yield node.lineno
        if not isinstance(node, SCOPES):
            yield from suspensions(ast.iter_child_nodes(node))


def test_what_is_compiled_awaits_nothing_in_except_or_finally() -> None:
    """The exception that mypyc's code handles is the thread's, not the coroutine's.

    Other tasks get it as their context while the coroutine is suspended there. A ``raise`` after it
    raises theirs, or ends the process: there is none. An ``__aexit__`` may not be suspended either.
    """
    found = {
        f"{file}:{line}"
        for file in compiled_files()
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.Try)
        for line in suspensions([*node.handlers, *node.finalbody])
    }
    assert found == set()


WITH_IO = {"gateway.http2.session"}
"""The only modules of sans-I/O rooms that do I/O."""


@pytest.mark.parametrize("package", ["gateway.protocol", "gateway.codec", "gateway.http2"])
def test_sans_io_rooms_load_no_io(package: str) -> None:
    program = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if module.name not in {WITH_IO!r}:
        importlib.import_module(module.name)
print(sorted({{"asyncio", "aiohttp"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
