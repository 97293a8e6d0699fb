"""Put a Triton server into a virtual environment, and find it there.

Usage: python -m tests.integration.triton.install DIR.

Needs the standard library only. The environment may get another Python than the one that runs
this: see choose_python.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.integration.environment import (
    CACHE,
    PYTHON_VERSIONS,
    InstallError,
    Interpreter,
    create,
    python_in,
    pythons,
)

REQUIREMENTS = Path(__file__).with_name("requirements.txt")

# There are wheels of numpy 1 for these; pip must compile it for any later Python.
_WITH_NUMPY_WHEEL = ("3.11", "3.12")


FOLDER = CACHE / "triton"


@dataclass(frozen=True, slots=True)
class Installation:
    """A virtual environment that holds the wheel with the server."""

    interpreter: Interpreter

    @property
    def _wheel(self) -> Path:
        return self.interpreter.site_packages / "pytriton" / "tritonserver"

    @property
    def tritonserver(self) -> Path:
        """The server's executable."""
        return self._wheel / "bin" / "tritonserver"

    @property
    def stub(self) -> Path:
        """The executable that runs Python models, for this environment's Python."""
        stubs = self._wheel / "python_backend_stubs"
        return stubs / self.interpreter.version / "triton_python_backend_stub"

    @property
    def libraries(self) -> Path:
        """The folder of the shared libraries that the wheel brings."""
        return self.interpreter.site_packages / "nvidia_pytriton.libs"

    def copy_backends(self, folder: Path) -> None:
        """Lay out the folder for --backend-directory: the wheel keeps the stub elsewhere."""
        python = folder / "python"
        shutil.copytree(self._wheel / "backends" / "python", python)
        shutil.copy2(self.stub, python)

    def environment(self) -> dict[str, str]:
        """Give the environment variables in which the server and its stubs find all they load."""
        kept = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
        libraries = [str(self.libraries)]
        if self.interpreter.library_folder:
            libraries.append(self.interpreter.library_folder)
        # The embedded Python finds its virtual environment through the first python3 on PATH.
        path = [str(self.interpreter.path.parent), kept.get("PATH", os.defpath)]
        return kept | {
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "PATH": os.pathsep.join(path),
            # Each of the stubs would start a thread per core for nothing.
            "OPENBLAS_NUM_THREADS": "1",
        }


def find(folder: Path = FOLDER) -> Installation:
    """Find the installation in folder; raise MissingServerError if it is not there."""
    return Installation(python_in(folder))


def choose_python() -> Interpreter:
    """Take this Python if it can run the Python backend, else another one on PATH."""
    usable = [python for python in pythons() if _has_library(python)]
    if not usable:
        versions = ", ".join(PYTHON_VERSIONS)
        raise InstallError(
            f"Triton's Python backend needs one of Python {versions}, with its shared library "
            "(on Debian and Ubuntu the package libpython3.x beside python3.x). None was found."
        )
    python = next((each for each in usable if each.version in _WITH_NUMPY_WHEEL), usable[0])
    if python.version not in _WITH_NUMPY_WHEEL:
        print(
            f"no Python {' or '.join(_WITH_NUMPY_WHEEL)} was found: "
            f"compiling numpy 1 for Python {python.version}, which takes some minutes ..."
        )
    return python


def _has_library(python: Interpreter) -> bool:
    # The wheel itself brings a libpython for 3.13.
    return python.library_folder is not None or python.version == "3.13"


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
        folder = Path(sys.argv[1])
        create(folder, choose_python(), REQUIREMENTS)
        check_libraries(Installation(python_in(folder, ready=False)))
    except InstallError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"could not set up Triton: {error}")


if __name__ == "__main__":
    main()
