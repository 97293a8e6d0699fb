"""What a wheel of the gateway holds, and when it is compiled. `make wheels` tests compiled ones."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.support.compiled import needs_source

ROOT = Path(__file__).parents[1]
NOTE = "gateway/not_compiled.txt"

pytestmark = needs_source


def build(folder: Path, **environ: str) -> tuple[str, str]:
    """Build a wheel; return its name, and what was printed beside it."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "TENSORGATE_PURE": "", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    printed = (done.stdout + done.stderr).replace(f"{path}\n", "")
    return path.name, printed


def note(folder: Path) -> str:
    """Return the reason that a wheel holds for not being compiled."""
    (path,) = folder.glob("*.whl")
    with ZipFile(path) as archive:
        return archive.read(NOTE).decode()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """Build a pure wheel; give the names of its files."""
    folder = tmp_path_factory.mktemp("wheel")
    name, printed = build(folder, TENSORGATE_PURE="1")
    assert name.endswith("-py3-none-any.whl")
    assert printed == "tensorgate: not compiled, pure Python: TENSORGATE_PURE is set\n"
    with ZipFile(folder / name) as archive:
        return frozenset(archive.namelist())


def test_a_wheel_without_a_compiler_is_pure_and_says_why_in_one_line(tmp_path: Path) -> None:
    name, printed = build(tmp_path / "dist", PATH=str(tmp_path), CC="no-such-compiler")
    assert name.endswith("-py3-none-any.whl")
    assert printed == "tensorgate: not compiled, pure Python: there is no C compiler\n"
    assert note(tmp_path / "dist") == "there is no C compiler\n"


def test_a_wheel_is_pure_if_compiling_fails(tmp_path: Path) -> None:
    package = tmp_path / "mypyc"
    package.mkdir()
    (package / "__init__.py").write_text("print('...')\nraise ImportError('it is broken')\n")
    # A program that exists, and is not run.
    name, printed = build(tmp_path / "dist", PYTHONPATH=str(tmp_path), CC=sys.executable)
    assert name.endswith("-py3-none-any.whl")
    reason = "compiling failed: ImportError: it is broken\n"
    assert printed == f"tensorgate: not compiled, pure Python: {reason}"
    assert note(tmp_path / "dist") == reason


def requirements(kind: str, monkeypatch: pytest.MonkeyPatch, pure: str) -> set[str]:
    """Return the names of what a build requires, where there is a compiler."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setenv("TENSORGATE_PURE", pure)
    module = runpy.run_path(str(ROOT / "hatch_build.py"))
    required: Callable[[], list[str]] = module[f"get_requires_for_build_{kind}"]
    return {each.partition(">")[0] for each in required()}


COMPILING = {"mypy", "setuptools", "multidict", "numpy", "orjson"}


@pytest.mark.parametrize(
    ("kind", "pure", "expected"),
    [
        ("wheel", "0", COMPILING),
        ("wheel", "1", set()),
        ("editable", "", {"editables~=0.3"}),
        ("editable", "0", COMPILING | {"editables~=0.3"}),
    ],
)
def test_only_a_build_that_compiles_requires_a_compiler_of_python(
    kind: str, pure: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requirements(kind, monkeypatch, pure) == expected


def test_rules_choose_the_compiled_modules_of_packages(tmp_path: Path) -> None:
    for name in ("one/__init__.py", "one/a.py", "one/b.py", "one/b_more.py", "two/a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    choose = runpy.run_path(str(ROOT / "hatch_build.py"))["compiled_modules"]
    assert choose(tmp_path, {"one": "* !b_*", "two": "a"}) == ["one/a.py", "one/b.py", "two/a.py"]
    for rules in ({"one": "c"}, {"one": "* !c"}, {"three": "*"}):
        with pytest.raises(ValueError, match="has no module"):
            choose(tmp_path, rules)


def test_the_wheel_holds_all_of_the_package_and_nothing_to_compile(wheel: frozenset[str]) -> None:
    # PEP 561 wants py.typed, and reflection serves the .binpb.
    suffixes = {".py", ".pyi", ".typed", ".binpb"}
    sources = [path for path in (ROOT / "gateway").rglob("*") if path.suffix in suffixes]
    assert {path.relative_to(ROOT).as_posix() for path in sources} <= wheel
    assert not [name for name in wheel if name.endswith((".c", ".so"))]


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_compiled_files_go_into_the_wheel_or_beside_the_sources(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the compiler, whose place a file takes."""
    monkeypatch.setenv("TENSORGATE_PURE", "0")
    root, built = tmp_path / "root", tmp_path / "module.so"
    (root / "gateway").mkdir(parents=True)
    built.write_bytes(b"compiled")
    hook_class: Any = runpy.run_path(str(ROOT / "hatch_build.py"))["BuildHook"]
    hook = hook_class(str(root), {}, None, None, "", "wheel")
    monkeypatch.setattr(hook, "compile", lambda folder: {str(built): "gateway/module.so"})
    build_data: dict[str, Any] = {"force_include": {}}
    hook.initialize(version, build_data)
    hook.finalize(version, build_data, "")
    is_beside = (root / "gateway" / "module.so").exists()
    in_wheel = {
        "force_include": {str(built): "gateway/module.so"},
        "pure_python": False,
        "infer_tag": True,
    }
    expected = {"standard": (False, in_wheel), "editable": (True, {"force_include": {}})}
    assert (is_beside, build_data) == expected[version]
