"""What a wheel of the gateway holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """Build a wheel without a compiler; give the names of its files."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = os.environ | {"HATCH_BUILD_HOOKS_ENABLE": "", "HATCH_BUILD_NO_HOOKS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    with ZipFile(path) as archive:
        return frozenset(archive.namelist())


def test_the_wheel_has_the_marker_of_typed_packages(wheel: frozenset[str]) -> None:
    """PEP 561: type checkers pass over a package without this file."""
    assert "gateway/py.typed" in wheel


def test_the_wheel_has_the_descriptors_that_reflection_serves(wheel: frozenset[str]) -> None:
    assert "gateway/protocol/grpc/descriptors.binpb" in wheel


def test_the_wheel_holds_all_of_the_package_and_nothing_to_compile(wheel: frozenset[str]) -> None:
    sources = [path for path in (ROOT / "gateway").rglob("*") if path.suffix in (".py", ".pyi")]
    assert {path.relative_to(ROOT).as_posix() for path in sources} <= wheel
    assert not [name for name in wheel if name.endswith((".c", ".so"))]
