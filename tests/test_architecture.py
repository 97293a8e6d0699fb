"""Imports point one way: from the command line down to the errors."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gateway

ROOT = Path(gateway.__file__).parent

# Which rooms of the house each room may import.
ALLOWED = {
    "errors": set[str](),
    "sizes": set[str](),
    "system": set[str](),
    "protocol": {"errors"},
    "codec": {"protocol", "errors"},
    "routing": {"protocol", "errors"},
    "http1": {"system"},
    "observe": {"errors"},
    "settings": {"system", "errors"},
    "demo": set[str](),
    "workers": {"system"},
    "build": {"http1"},
    "upstream": {"system", "http1", "routing", "codec", "protocol", "errors"},
    "offload": {"codec", "protocol", "system"},
    "proxy": {"system", "upstream", "routing", "codec", "protocol", "observe", "errors"},
    "listener": {"system", "proxy", "http1", "observe", "errors"},
    "admin": {"build", "errors", "listener", "observe", "proxy"},
    "app": {
        "admin",
        "build",
        "system",
        "offload",
        "listener",
        "proxy",
        "upstream",
        "routing",
        "codec",
        "protocol",
        "observe",
        "settings",
        "workers",
        "errors",
    },
    "cli": {"app", "build", "system", "settings", "demo", "workers"},
    "__main__": {"cli"},
}


def test_nothing_that_is_compiled_lies_beside_the_sources() -> None:
    """It would be what runs, whatever the sources say: `make clean` removes it."""
    assert not list((Path(__file__).parents[1] / "gateway").rglob("*.so"))


def modules() -> list[Path]:
    return [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names of what a file imports of the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    own = room(path)
    rooms = {
        name.split(".")[1]
        for name in imported(path)
        if name.startswith("gateway.") and name.split(".")[1] not in {own, "sizes"}
    }
    assert rooms <= ALLOWED[own]


def test_every_room_is_known() -> None:
    assert {room(path) for path in modules()} == set(ALLOWED)


@pytest.mark.parametrize("package", ["gateway.protocol", "gateway.codec"])
def test_sans_io_rooms_load_no_io(package: str) -> None:
    program = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(sorted({{"asyncio", "aiohttp"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
