"""Set up NVIDIA's perf_analyzer: python -m tests.integration.perf_analyzer.install DIR.

Needs the standard library and the tests' Triton. The binary asks for libraries that few machines
have (libb64, the runtime of CUDA); those are taken from Triton's wheel, which has them all.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.integration.environment import InstallError, MissingServerError
from tests.integration.triton.install import Installation, find

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def program(folder: Path) -> Path:
    """Give the place of the binary in the folder that it is installed to."""
    return folder / "bin" / "perf_analyzer"


def environment(folder: Path) -> dict[str, str]:
    """Give the environment variables in which the binary finds its libraries."""
    return {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib")}


def create(folder: Path, triton: Installation) -> None:
    """Install into the folder what requirements.txt says, and link the libraries."""
    pip = [str(triton.interpreter.path), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-compile", "--upgrade", "--target", str(folder)]
    subprocess.run([*pip, "install", *options, "-r", str(REQUIREMENTS)], check=True)
    links = folder / "lib"
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir()
    # A library that is linked may ask for others.
    while missing := _missing(folder):
        for name in missing:
            library = _library(triton, name)
            (links / name).symlink_to(os.path.relpath(library, links))


def _missing(folder: Path) -> list[str]:
    # This variable makes the loader list the libraries instead of running the program (as ldd).
    traced = environment(folder) | {"LD_TRACE_LOADED_OBJECTS": "1"}
    listed = subprocess.run([program(folder)], env=traced, capture_output=True, text=True)
    if listed.returncode:
        raise InstallError(f"perf_analyzer cannot be run on this machine: {listed.stderr.strip()}")
    return [line.split()[0] for line in listed.stdout.splitlines() if "not found" in line]


def _library(triton: Installation, name: str) -> Path:
    """Find a library in Triton's wheel, where libx.so.1 is called libx-0a1b2c3d.so.1.2."""
    stem, _, version = name.partition(".so.")
    found = next(triton.libraries.glob(f"{stem}-*.so.{version}*"), None)
    if found is None:
        raise InstallError(f"perf_analyzer cannot be run on this machine: {name} not found")
    return found


def main() -> None:
    """Install into the folder that the command line names."""
    try:
        create(Path(sys.argv[1]), find())
    except (InstallError, MissingServerError) as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"could not set up perf_analyzer: {error}")


if __name__ == "__main__":
    main()
