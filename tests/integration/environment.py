"""Put a server into a virtual environment: python -m tests.integration.environment NAME.

NAME is a folder beside this file. What its requirements.txt says goes into .cache/NAME: servers
get one each, as their pins clash. Needs the standard library only.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"

# There are wheels of all that the servers need for these, and the gateway supports them.
PYTHON_VERSIONS = ("3.11", "3.12", "3.13")


# Triton's backend embeds Python, so it needs the shared library; where sysconfig's LIBDIR
# does not hold it, the loader may know another place ("" below).
_QUESTIONS = """
import ctypes, json, os, sys, sysconfig
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
folder = None
for place in (sysconfig.get_config_var("LIBDIR"), os.path.join(sys.base_prefix, "lib"), ""):
    try:
        ctypes.CDLL(os.path.join(place or "", name))
    except OSError:
        continue
    folder = place or ""
    break
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "site_packages": sysconfig.get_path("purelib"),
    "library_folder": folder,
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter.

    version is like "3.11". library_folder holds libpython; it is empty if the system's loader
    finds it by itself, and None if there is no shared libpython.
    """

    path: Path
    version: str
    site_packages: Path
    library_folder: str | None


def probe(path: Path) -> Interpreter | None:
    """Ask the interpreter at path; answer None if it cannot be run."""
    try:
        run = subprocess.run([path, "-I", "-c", _QUESTIONS], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    said = json.loads(run.stdout)
    return Interpreter(path, said["version"], Path(said["site_packages"]), said["library_folder"])


class MissingServerError(Exception):
    """There is no usable server; the message says what to do."""


class InstallError(Exception):
    """The installation cannot work; the message says what to do."""


def pythons() -> Iterator[Interpreter]:
    """Give this Python and others on PATH, as far as their versions will do."""
    names = [sys.executable, *(f"python{version}" for version in PYTHON_VERSIONS[::-1])]
    for name in names:
        path = shutil.which(name)
        python = probe(Path(path)) if path else None
        if python is not None and python.version in PYTHON_VERSIONS:
            yield python


def create(folder: Path, python: Interpreter, requirements: Path) -> None:
    """Create the virtual environment anew and install what the file says, and nothing else."""
    subprocess.run([python.path, "-m", "venv", "--clear", folder], check=True)
    pip = [str(folder / "bin" / "python3"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # Most of what is installed is never imported, so it is compiled when it is. MLServer says that
    # it is not for Python 3.13, and runs well there.
    options = ["--no-deps", "--no-compile", "--ignore-requires-python"]
    subprocess.run([*pip, "install", *options, "-r", requirements], check=True)


def python_in(folder: Path, *, ready: bool = True) -> Interpreter:
    """Find the Python of a virtual environment, ``ready`` if it must be marked as complete.

    Raises MissingServerError where there is none.
    """
    if ready and not (folder / ".ready").exists():
        raise MissingServerError(
            f"no {folder.name} server in {folder}: run `make test`, it sets one up"
        )
    interpreter = probe(folder / "bin" / "python3")
    if interpreter is None:
        raise MissingServerError(
            f"{folder} holds no working Python (any more): run `make clean test`"
        )
    return interpreter


def main() -> None:
    """Install the server that the command line names."""
    name = sys.argv[1]
    python = next(pythons(), None)
    if python is None:
        sys.exit(f"{name} needs one of Python {', '.join(PYTHON_VERSIONS)}. None was found.")
    try:
        create(CACHE / name, python, Path(__file__).with_name(name) / "requirements.txt")
    except subprocess.CalledProcessError as error:
        sys.exit(f"could not set up {name}: {error}")


if __name__ == "__main__":
    main()
