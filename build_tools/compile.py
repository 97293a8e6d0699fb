"""Compiles the fast path by mypyc, and the C module.

With names of modules, it compiles these and the C module of the sources in the current folder, into
``built``: hatch_build.py runs it so. Without, it compiles the C module alone beside its sources, in
seconds, for development.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

_PACKAGE = ("gateway", "codec", "native")
"""The package of the C module, with its sources."""

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class BuildInParallel(build_ext):
    """Compiles the files of one extension at the same time: setuptools does one by one."""

    def build_extensions(self) -> None:
        """Compile on all cores."""
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(_CORES) as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
                return [each for one in objects for each in one]

        self.compiler.compile = compile_each
        super().build_extensions()


def _build(extensions: Sequence[Extension], folder: Path) -> None:
    command = BuildInParallel(Distribution({"ext_modules": extensions}))
    command.build_lib, command.build_temp = str(folder), str(folder.with_name("objects"))
    command.parallel = _CORES
    command.ensure_finalized()
    command.run()


def _c_module(package: Path, folder: Path) -> Extension:
    """Return the C module as an extension; ``folder`` gets a header."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not by an import: with PYTHONSAFEPATH, that would not look here.
    tables = runpy.run_path(str(Path(__file__).with_name("float_tables.py")))
    (folder / "powers_of_ten.h").write_text(tables["powers_of_ten"]())
    # With -O3, gcc 12 needs a fifth more time for most numbers.
    return Extension(
        ".".join((*_PACKAGE, "_native")),
        sorted(map(str, package.glob("*.c"))),
        include_dirs=[str(folder)],
        extra_compile_args=["-O2", "-std=c11"],
    )


def _compile_all(modules: Sequence[str]) -> None:
    from mypyc.build import mypycify

    # Of what is not installed here, no type is used: the C that mypyc writes is the same.
    options = ["--config-file=", "--ignore-missing-imports"]
    extensions = mypycify(
        [*options, *modules], opt_level="2", multi_file=True, target_dir="generated"
    )
    for each in extensions:
        # Else calls between modules go through a table, as another library might replace them.
        each.extra_compile_args.append("-fvisibility=hidden")
    extensions.append(_c_module(Path(*_PACKAGE), Path("generated")))
    _build(extensions, Path("built"))


def _compile_beside_the_sources() -> None:
    package = Path(__file__).parents[1].joinpath(*_PACKAGE)
    with TemporaryDirectory(prefix="tensorgate-build-") as name:
        folder = Path(name)
        _build([_c_module(package, folder)], folder / "built")
        for path in (folder / "built").rglob("*.so"):
            shutil.copy(path, package)


if __name__ == "__main__":
    if sys.argv[1:]:
        _compile_all(sys.argv[1:])
    else:
        _compile_beside_the_sources()
