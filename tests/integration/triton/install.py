"""Put a Triton server into a virtual environment: python -m tests.integration.triton.install DIR.

Needs the standard library only. The environment may get another Python than the one that runs
this: see choose_python.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.integration.triton.installation import PYTHON_VERSIONS, Installation, at
from tests.integration.triton.interpreter import Interpreter, probe

REQUIREMENTS = Path(__file__).with_name("requirements.txt")

# There are wheels of numpy 1 for these; pip must compile it for any later Python.
_WITH_NUMPY_WHEEL = ("3.11", "3.12")


class InstallError(Exception):
    """The installation cannot work; the message says what to do."""


def choose_python() -> Interpreter:
    """Take this Python if it can run the Python backend, else another one on PATH."""
    usable = [python for python in _candidates() if _is_usable(python)]
    if not usable:
        versions = ", ".join(PYTHON_VERSIONS)
        raise InstallError(
            f"Triton's Python backend needs one of Python {versions}, with its shared library "
            "(on Debian and Ubuntu the package libpython3.x beside python3.x). None was found."
        )
    return next((each for each in usable if each.version in _WITH_NUMPY_WHEEL), usable[0])


def _candidates() -> Iterator[Interpreter]:
    names = [sys.executable, *(f"python{version}" for version in PYTHON_VERSIONS[::-1])]
    for name in names:
        path = shutil.which(name)
        python = probe(Path(path)) if path else None
        if python is not None:
            yield python


def _is_usable(python: Interpreter) -> bool:
    # The wheel itself brings a libpython for 3.13.
    has_library = python.library_folder is not None or python.version == "3.13"
    return python.version in PYTHON_VERSIONS and has_library


def create(folder: Path) -> Installation:
    """Create the virtual environment anew and install what requirements.txt says."""
    python = choose_python()
    if python.version not in _WITH_NUMPY_WHEEL:
        print(
            f"no Python {' or '.join(_WITH_NUMPY_WHEEL)} was found: "
            f"compiling numpy 1 for Python {python.version}, which takes some minutes ..."
        )
    subprocess.run([python.path, "-m", "venv", "--clear", folder], check=True)
    pip = [str(folder / "bin" / "python3"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "-r", str(REQUIREMENTS)], check=True)
    return at(folder)


def check_libraries(installation: Installation) -> None:
    """Raise InstallError if the loader misses a shared library of the server or the stub."""
    # This variable makes the loader list the libraries instead of running the program (as ldd).
    environment = installation.environment() | {"LD_TRACE_LOADED_OBJECTS": "1"}
    for program in (installation.tritonserver, installation.stub):
        listed = subprocess.run([program], env=environment, capture_output=True, text=True)
        missing = [line.split()[0] for line in listed.stdout.splitlines() if "not found" in line]
        if listed.returncode or missing:
            what = ", ".join(missing) or listed.stderr.strip()
            raise InstallError(f"{program.name} cannot be run on this machine: {what} not found")


def main() -> None:
    """Install into the folder that the command line names."""
    try:
        check_libraries(create(Path(sys.argv[1])))
    except InstallError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"could not set up Triton: {error}")


if __name__ == "__main__":
    main()
