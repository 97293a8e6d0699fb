"""Compiles the fast path by mypyc, and the C modules.

With names of modules, it compiles these and the C modules of the sources in the current folder,
into ``built``: hatch_build.py runs it so. Without, it compiles the C modules alone beside their
sources, in seconds, for development.
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

_C_MODULES = {"gateway/codec/native": "_native", "gateway/http1/native": "_heads"}
"""The C modules, each by the folder of its sources."""

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


def _c_modules(root: Path, folder: Path) -> list[Extension]:
    """Return the C modules of a checkout as extensions; ``folder`` gets a header."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not by an import: with PYTHONSAFEPATH, that would not look here.
    tables = runpy.run_path(str(Path(__file__).with_name("float_tables.py")))
    (folder / "powers_of_ten.h").write_text(tables["powers_of_ten"]())
    # With -O3, gcc 12 needs a fifth more time for most numbers.
    return [
        Extension(
            f"{package}/{name}".replace("/", "."),
            sorted(map(str, (root / package).glob("*.c"))),
            include_dirs=[str(folder)],
            extra_compile_args=["-O2", "-std=c11"],
        )
        for package, name in _C_MODULES.items()
    ]


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
    extensions += _c_modules(Path(), Path("generated"))
    _build(extensions, Path("built"))


def _compile_beside_the_sources() -> None:
    root = Path(__file__).parents[1]
    with TemporaryDirectory(prefix="tensorgate-build-") as name:
        folder = Path(name)
        _build(_c_modules(root, folder), folder / "built")
        for path in (folder / "built").rglob("*.so"):
            shutil.copy(path, root / path.relative_to(folder / "built").parent)


if __name__ == "__main__":
    if sys.argv[1:]:
        _compile_all(sys.argv[1:])
    else:
        _compile_beside_the_sources()
