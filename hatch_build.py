"""Builds wheels, compiled where that is possible: see docs/guide/install.md, "Compiled".

pyproject.toml names this file twice. Its hook compiles during hatchling's build of a wheel, by
build_tools/compile.py. Its functions are the build backend, and are hatchling's but for what they
require: an install that compiles nothing needs no compiler of Python.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling import build as hatchling
from hatchling.build import *  # noqa: F403
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT = Path(__file__).parent
_NOTE = "gateway/not_compiled.txt"
"""Where a wheel says why it is not compiled. pip hides what a build prints."""

_NEWEST = (3, 14)
_MACHINES = ("aarch64", "arm64", "x86_64")
"""What mypy has wheels for. Elsewhere its installation could fail, and the gateway's with it."""


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Require what compiles, where a wheel can be compiled: PEP 517."""
    required = hatchling.get_requires_for_build_wheel(config_settings)
    return required if _obstacle() else [*required, *_compile_requires()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Require what compiles, where an editable install is to be compiled: PEP 660."""
    required = hatchling.get_requires_for_build_editable(config_settings)
    return [*required, *_compile_requires()] if _must_compile() else required


def _compile_requires() -> list[str]:
    """Return the requirements of a build that compiles.

    Of the gateway's own ones, these are all whose types tell in what mypyc writes.
    """
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    settings = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    typed = [
        each
        for each in project["project"]["dependencies"]
        if re.match(r"[\w.-]+", each)[0] in settings["typed"]
    ]
    return [*settings["compile-requires"], *typed]


def _must_compile() -> bool:
    return os.environ.get("TENSORGATE_PURE") == "0"


def _must_be_pure() -> bool:
    return os.environ.get("TENSORGATE_PURE", "0") not in ("", "0")


def _obstacle() -> str:
    """Return why nothing is to be compiled here, "" if it can be."""
    if _must_compile():
        return ""
    if _must_be_pure():
        return "TENSORGATE_PURE is set"
    if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it takes CPython, and not a free-threaded one"
    if sys.version_info[:2] > _NEWEST or platform.machine() not in _MACHINES:
        version, machine = platform.python_version(), platform.machine()
        return f"mypy may have no wheel for Python {version} on {machine}"
    return _missing_tool()


def _missing_tool() -> str:
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    try:
        (program, *_) = shlex.split(compiler)
    except ValueError:  # nothing, or a quote that never ends
        program = ""
    if shutil.which(program) is None:
        return "there is no C compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h is missing"
    return ""


class BuildHook(BuildHookInterface[Any]):
    """Compiles the fast path and the C module for a wheel, and goes on without if that fails."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add what was compiled to the wheel, or the reason why nothing was.

        With TENSORGATE_PURE=0, a failure ends the build.
        """
        self._folder = TemporaryDirectory(prefix="tensorgate-build-")
        if version == "editable" and not _must_compile():
            return
        obstacle = _obstacle()
        if not obstacle:
            try:
                built = self.compile(Path(self._folder.name))
            except _CompileError as error:
                if _must_compile():
                    raise
                obstacle = str(error)
        if obstacle:
            print(f"tensorgate: not compiled, pure Python: {obstacle}", file=sys.stderr)
            if not _must_be_pure():
                note = Path(self._folder.name, "note")
                note.write_text(f"{obstacle}\n")
                build_data["force_include"][str(note)] = _NOTE
        elif version == "editable":
            for path, name in built.items():
                shutil.copy(path, Path(self.root, name))
        else:
            build_data["force_include"] |= built
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made on the way."""
        self._folder.cleanup()

    def compile(self, folder: Path) -> dict[str, str]:
        """Compile in a folder of its own; return the place in the wheel of each file.

        So two builds of one checkout do not disturb each other, and leave nothing in it. mypy finds
        no settings there either, nor does setuptools find the project.
        """
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(Path(self.root, "gateway"), folder / "gateway", ignore=ignored)
        modules = compiled_modules(folder, self.config["mypyc"])
        done = subprocess.run(  # noqa: S603  # its own command
            [sys.executable, _ROOT / "build_tools" / "compile.py", *modules],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise _CompileError(done.stdout)
        built = folder / "built"
        return {str(path): str(path.relative_to(built)) for path in built.rglob("*.so")}


def compiled_modules(root: Path, rules: Mapping[str, str]) -> list[str]:
    """Return the modules to compile, by the rules of pyproject.toml for each package.

    Raises ValueError for a rule that no module fits.
    """
    modules: set[Path] = set()
    for package, names in rules.items():
        for name in names.split():
            found = set(Path(root, package).glob(f"{name.removeprefix('!')}.py"))
            if not found:
                raise ValueError(f"pyproject.toml, mypyc: {package} has no module {name}")
            modules = modules - found if name.startswith("!") else modules | found
    return sorted(str(path.relative_to(root)) for path in modules if path.name[0] != "_")


class _CompileError(Exception):
    """The compiler failed; as text, the line of its output that says why."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output

    def __str__(self) -> str:
        if _must_compile():
            return self.output
        lines = self.output.strip().splitlines() or ["it ended without a word"]
        reasons = [line for line in lines if re.search(r"(^|[: ])\w*[Ee]rror: ", line)]
        return f"compiling failed: {(reasons or lines[-1:])[0].strip()}"
