"""Find the Triton server that `make test` has put under .cache/triton."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.integration.environment import CACHE, python_in
from tests.integration.interpreter import Interpreter

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


def at(folder: Path) -> Installation:
    """Look at the virtual environment in folder, be it marked as ready or not."""
    return Installation(python_in(folder, ready=False))
