"""Compiles the C module for other machines, with the options of a wheel."""

from __future__ import annotations

import runpy
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[3]
_SOURCES = ROOT / "gateway" / "codec" / "native"
# On aarch64, char is unsigned: a comparison that takes it for signed is always the same there.
_OPTIONS = ("-O2", "-std=c11", "-fPIC", "-Werror=type-limits")


def write_sources(folder: Path, right: str = "", wrong: str = "") -> list[Path]:
    """Write the sources into a folder, with one part of them changed; return the .c files."""
    texts = {path.name: path.read_text() for path in _SOURCES.glob("*.[ch]")}
    assert not right or sum(text.count(right) for text in texts.values()) == 1
    for name, text in texts.items():
        (folder / name).write_text(text.replace(right, wrong) if right else text)
    tables = runpy.run_path(str(ROOT / "build_tools" / "float_tables.py"))
    (folder / "powers_of_ten.h").write_text(tables["powers_of_ten"]())
    return sorted(folder.glob("*.c"))


def compile_all(compiler: str, sources: list[Path], *options: str) -> list[str]:
    """Compile sources, and return the object files beside them."""

    def compile_one(source: Path) -> str:
        built = str(source.with_suffix(".o"))
        run(compiler, *_OPTIONS, *options, "-c", str(source), "-o", built)
        return built

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def run(*command: str, data: bytes | None = None) -> bytes:
    """Run a program that must succeed; return what it prints."""
    done = subprocess.run(command, input=data, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
