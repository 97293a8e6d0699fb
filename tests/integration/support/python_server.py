"""Runs a server written in Python in a virtual environment of its own."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.environment import CACHE, ROOT, python_in
from tests.integration.kserve import models as kserve
from tests.integration.mlserver import models as mlserver
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


class KServe(PythonServer):
    """A KServe model server with the tests' models."""

    name = dialect = "kserve"

    def __init__(self) -> None:
        super().__init__(kserve.MODELS)


class MLServer(PythonServer):
    """An MLServer with the tests' models."""

    name, dialect = "mlserver", "json"

    def __init__(self) -> None:
        super().__init__(mlserver.MODELS)


class Script:
    """A running script of NAME in the environment of NAME, which answers each line with a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, line: str, seconds: float = 60) -> str:
        """Send a line, and return the answer; fails where the script ends, or takes too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            answer = self._process.stdout.readline()
        finally:
            timer.cancel()
        assert answer, f"the script ended with {self._process.wait()}"
        return answer


@contextmanager
def running_script(name: str, script: str) -> Iterator[Script]:
    """Run a script that answers lines: what it imports takes seconds."""
    program = _program(name, script)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        program.command, env=program.environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            yield Script(process)
        finally:
            process.kill()


def _program(name: str, script: str, *arguments: str) -> Program:
    python = str(python_in(CACHE / name).path)
    kept = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
    # Scripts import of the tests what tells the models.
    environment = kept | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = (python, "-m", f"tests.integration.{name}.{script}", *arguments)
    return Program(Path(python), command, environment)
