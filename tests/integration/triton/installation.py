"""Find the Triton server that `make test` has put under .cache/triton."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.integration.triton.interpreter import Interpreter, probe

FOLDER = Path(__file__).parents[3] / ".cache" / "triton"

# The Pythons that the wheel has a stub for and that the gateway supports.
PYTHON_VERSIONS = ("3.11", "3.12", "3.13")


class TritonMissingError(Exception):
    """There is no usable Triton; the message says what to do."""


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

    def copy_backends(self, folder: Path) -> None:
        """Lay out the folder for --backend-directory: the wheel keeps the stub elsewhere."""
        python = folder / "python"
        shutil.copytree(self._wheel / "backends" / "python", python)
        shutil.copy2(self.stub, python)

    def environment(self) -> dict[str, str]:
        """Give the environment variables in which the server and its stubs find all they load."""
        kept = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
        libraries = [str(self.interpreter.site_packages / "nvidia_pytriton.libs")]
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
    """Find the installation in folder; raise TritonMissingError if it is not there."""
    if not (folder / ".ready").exists():
        raise TritonMissingError(f"no Triton server in {folder}: run `make test`, it sets one up")
    return at(folder)


def at(folder: Path) -> Installation:
    """Look at the virtual environment in folder, be it marked as ready or not."""
    interpreter = probe(folder / "bin" / "python3")
    if interpreter is None:
        raise TritonMissingError(
            f"{folder} holds no working Python (any more): run `make clean test`"
        )
    return Installation(interpreter)
