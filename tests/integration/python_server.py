"""Run a server that a script of the tests starts in a virtual environment of its own."""

import os
from pathlib import Path

from tests.integration.environment import CACHE, ROOT, python_in
from tests.integration.real_server import Program, RealServer


class PythonServer(RealServer):
    """A server whose environment is .cache/NAME and whose script is NAME/serve.py, PORTS follow."""

    def _prepare(self, folder: Path) -> Program:
        python = str(python_in(CACHE / self.name).path)
        kept = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
        # The script imports of the tests what tells the models.
        environment = kept | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        module = f"tests.integration.{self.name}.serve"
        return Program(Path(python), (python, "-m", module, *map(str, self.ports)), environment)
