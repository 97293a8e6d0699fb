"""Runs a server written in Python in a virtual environment of its own."""

import os
import socket
import subprocess
from pathlib import Path

from tests.integration.environment import CACHE, ROOT, python_in
from tests.integration.support.real_server import HOST, Program, RealServer


class PythonServer(RealServer):
    """A server whose environment is .cache/NAME and whose script is NAME/serve.py, PORTS follow.

    It binds its port for gRPC at any time, before that for HTTP or after it.
    """

    def _prepare(self, folder: Path) -> Program:
        return _program(self.name, "serve", *map(str, self.ports))

    def _has_bound(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex((HOST, self.grpc_port)) == 0


def run_script(name: str, script: str, *arguments: str, seconds: float = 60) -> str:
    """Run a script of NAME in the environment of NAME, and give what it prints."""
    program = _program(name, script, *arguments)
    run = subprocess.run(
        program.command, env=program.environment, capture_output=True, text=True, timeout=seconds
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def _program(name: str, script: str, *arguments: str) -> Program:
    python = str(python_in(CACHE / name).path)
    kept = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
    # Scripts import of the tests what tells the models.
    environment = kept | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = (python, "-m", f"tests.integration.{name}.{script}", *arguments)
    return Program(Path(python), command, environment)
