"""Starts, watches and stops real servers."""

import abc
import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from tests.integration.triton.models import Model
from tests.support.servers.openvino import OpenVino

HOST = "127.0.0.1"
_PORTS = range(20_000, 32_000)
"""None that the system gives to somebody else while a server starts."""

BOUND_CHILD = Path(__file__).with_name("bound_child.py")
_POLL_SECONDS = 0.05
_READY_SECONDS = 60.0
_LOG_TAIL_LINES = 40
_LOG_LINE_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Reached:
    """A server and the address at which a gateway reaches it; over gRPC it is the same server."""

    name: str
    dialect: str
    url: str

    @property
    def over_grpc(self) -> bool:
        """Return whether the address is that of gRPC."""
        return self.url.startswith("grpc")


class ServerError(Exception):
    """The server could not be started, or has ended by itself."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run; ``python`` is one that can itself be run in this environment."""

    python: Path
    command: tuple[str, ...]
    environment: Mapping[str, str]


class RealServer(abc.ABC):
    """A real server with models of the tests, bound to the loopback address.

    A context manager; start() and stop() do the same by hand. Of ``ports``, the first is that of
    HTTP and the second that of gRPC; 0 means any free one. All files are in a temporary folder,
    which stop() removes. Should this process die without a stop(), the server ends too: the kernel
    watches the thread that called start(), so let that be one that lives as long as the server
    shall.
    """

    name: ClassVar[str]
    dialect: ClassVar[str]
    """Its row in gateway/protocol/dialects.py."""

    def __init__(self, models: Sequence[Model], *, ports: Sequence[int] = (0, 0)) -> None:
        self.models = tuple(models)
        self.ports = _ports(*ports)
        self.http_port, self.grpc_port = self.ports[:2]
        self.http_url = f"http://{HOST}:{self.http_port}"
        self.grpc_url = f"grpc://{HOST}:{self.grpc_port}"
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the server; it becomes invalid with stop()."""
        return self._running().pid

    @property
    def log_path(self) -> Path:
        """The server's log; stop() removes it."""
        return self._home() / "log"

    def start(self) -> None:
        """Start the server and wait until all models are ready; raise ServerError if it fails."""
        if self._process is not None:
            raise ServerError("this server is running already")
        try:
            self._launch()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def is_alive(self) -> bool:
        """Return whether the process is running: some requests make a server crash."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Wait until the server ends by itself; answer its exit status."""
        return self._running().wait()

    def stop(self, patience: float = 15.0) -> None:
        """End the server, by force after patience seconds; do nothing if it is not running."""
        process, self._process = self._process, None
        try:
            if process is not None:
                _end(process, patience)
        finally:
            self._clean_up()

    def log_tail(self) -> str:
        """Return the log's last lines, and before them those that tell of errors."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        errors = [line for line in lines[:-_LOG_TAIL_LINES] if line.startswith("E")]
        chosen = errors[-_LOG_TAIL_LINES:] + lines[-_LOG_TAIL_LINES:]
        return "\n".join(line[:_LOG_LINE_CHARACTERS] for line in chosen)

    @abc.abstractmethod
    def _prepare(self, folder: Path) -> Program:
        """Lay out in the folder what the server needs, and tell how it is started.

        Raises MissingServerError or ServerError if it cannot be started on this machine.
        """

    def _has_bound(self) -> bool:
        """Return whether whoever answers at the port is this server."""
        return True

    def _clean_up(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("this server is not running")
        return self._process

    def _home(self) -> Path:
        if self._folder is None:
            raise ServerError("this server is not running")
        return self._folder

    def _launch(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"tensorgate-{self.name}-"))
        program = self._prepare(self._folder)
        bound = [str(program.python), "-I", "-S", str(BOUND_CHILD), str(os.getpid())]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*bound, *program.command],
                cwd=self._folder,
                env=program.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the terminal is for us alone, and its children get a group with it.
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while not self._answers_ready():
            status = self._running().poll()
            if status is not None:
                raise ServerError(f"{self.name} ended with status {status}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name} was not ready within {_READY_SECONDS} s:\n{self.log_tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def _answers_ready(self) -> bool:
        if not self._has_bound():
            return False
        connection = http.client.HTTPConnection(HOST, self.http_port, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


InferenceServer = RealServer | OpenVino


def _ports(*wanted: int) -> tuple[int, ...]:
    """Replace each 0 by a free port; raise ServerError if one of the others is in use."""
    with contextlib.ExitStack() as held:
        # All are held until each is bound, so that they differ.
        return tuple(_bind(held.enter_context(socket.socket()), port) for port in wanted)


def _bind(held: socket.socket, port: int) -> int:
    # Connections that ended a moment ago must not hinder a restart at the same port.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if not port:
        return _bind_to_any(held)
    try:
        held.bind((HOST, port))
    except OSError as error:
        raise ServerError(f"cannot listen at {HOST}:{port}: {error.strerror}") from error
    return port


def _bind_to_any(held: socket.socket) -> int:
    for port in random.sample(_PORTS, len(_PORTS)):
        try:
            held.bind((HOST, port))
        except OSError:
            continue
        return port
    raise ServerError(f"no port of {HOST} is free")


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        try:
            process.wait(patience)
        finally:
            # Out of patience, or interrupted: its children end too, they are in its group.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
