"""Run a real Triton server on this machine."""

import contextlib
import http.client
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.integration.triton.installation import Installation, find
from tests.integration.triton.models import MODELS, Model, write_repository

HOST = "127.0.0.1"
SHARED_MEMORY = Path("/dev/shm")
_PORTS = range(20_000, 32_000)
"""None that the system gives to somebody else while the server starts."""

_BOUND_CHILD = Path(__file__).with_name("bound_child.py")
# Each model version begins with this much shared memory, and gets more as its tensors need it.
_REGION_BYTES = 1024 * 1024
_SPARE_BYTES = 8 * 1024 * 1024
# Triton says that it started a service before it binds the port, and ends if it cannot. With
# this line the HTTP port is its own: before it, another server might be answering there.
_STARTED_LAST = b"Started Metrics Service"
_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 40
_LOG_LINE_CHARACTERS = 400


class TritonError(Exception):
    """The server could not be started, or has ended by itself."""


class TritonServer:
    """A Triton server with the tests' models, bound to the loopback address.

    A context manager; start() and stop() do the same by hand. A port of 0 means any free one.
    All files are in a temporary folder, which stop() removes. Should this process die without a
    stop(), the server ends too: the kernel watches the thread that called start(), so let that
    be one that lives as long as the server shall.
    """

    def __init__(
        self,
        models: Sequence[Model] = MODELS,
        *,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        ready_within: float = 60.0,
    ) -> None:
        self.models = tuple(models)
        self.http_port, self.grpc_port, self.metrics_port = _ports(
            http_port, grpc_port, metrics_port
        )
        self.http_url = f"http://{HOST}:{self.http_port}"
        self.metrics_url = f"http://{HOST}:{self.metrics_port}/metrics"
        self._ready_within = ready_within
        self.region_prefix = f"tensorgate_{secrets.token_hex(4)}_"
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

    @property
    def trace_path(self) -> Path:
        """The file that traces go to; stop() removes it."""
        return self._home() / "trace.json"

    def start(self) -> None:
        """Start the server and wait until all models are ready; raise TritonError if it fails."""
        if self._process is not None:
            raise TritonError("this server is running already")
        installation = find()
        _check_shared_memory(self.models)
        try:
            self._launch(installation)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def is_alive(self) -> bool:
        """Tell whether the process is running: some requests make a Triton crash."""
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
        """Give the log's last lines, and before them those that tell of errors."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        errors = [line for line in lines[:-_LOG_TAIL_LINES] if line.startswith("E")]
        chosen = errors[-_LOG_TAIL_LINES:] + lines[-_LOG_TAIL_LINES:]
        return "\n".join(line[:_LOG_LINE_CHARACTERS] for line in chosen)

    def _clean_up(self) -> None:
        # A server that was killed leaves its shared memory behind.
        for region in SHARED_MEMORY.glob(f"{self.region_prefix}*"):
            region.unlink(missing_ok=True)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise TritonError("this server is not running")
        return self._process

    def _home(self) -> Path:
        if self._folder is None:
            raise TritonError("this server is not running")
        return self._folder

    def _launch(self, installation: Installation) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tensorgate-triton-"))
        write_repository(self.models, self._folder / "models")
        installation.copy_backends(self._folder / "backends")
        python = str(installation.interpreter.path)
        bound = [python, "-I", "-S", str(_BOUND_CHILD), str(os.getpid())]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*bound, str(installation.tritonserver), *self._arguments(self._folder)],
                env=installation.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the terminal is for us alone, and the stubs get a group with the server.
                start_new_session=True,
            )

    def _arguments(self, folder: Path) -> list[str]:
        return [
            f"--model-repository={folder / 'models'}",
            f"--backend-directory={folder / 'backends'}",
            *("--model-control-mode=explicit", "--load-model=*"),
            # Else each Python model is started twice: 13 s instead of 2 s for 35 models.
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={self.region_prefix}",
            f"--backend-config=python,shm-default-byte-size={_REGION_BYTES}",
            *(f"--http-address={HOST}", f"--http-port={self.http_port}"),
            *(f"--grpc-address={HOST}", f"--grpc-port={self.grpc_port}"),
            *(f"--metrics-address={HOST}", f"--metrics-port={self.metrics_port}"),
            "--allow-gpu-metrics=false",
            "--trace-config=mode=triton",
            "--trace-config=level=TIMESTAMPS",
            "--trace-config=rate=1000",
            f"--trace-config=triton,file={self.trace_path}",
        ]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._ready_within
        while not self._answers_ready():
            status = self._running().poll()
            if status is not None:
                raise TritonError(f"Triton ended with status {status}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise TritonError(
                    f"Triton was not ready within {self._ready_within} s:\n{self.log_tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def _answers_ready(self) -> bool:
        if _STARTED_LAST not in self.log_path.read_bytes():
            return False
        connection = http.client.HTTPConnection(HOST, self.http_port, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def free_shared_memory() -> int:
    """Give the free bytes of shared memory: a tensor takes its size there, on the way in and out.

    Triton keeps what it has taken until the model is unloaded.
    """
    return shutil.disk_usage(SHARED_MEMORY).free


def _check_shared_memory(models: Sequence[Model]) -> None:
    needed = sum(len(model.versions) for model in models) * _REGION_BYTES + _SPARE_BYTES
    free = free_shared_memory()
    if free < needed:
        raise TritonError(
            f"{SHARED_MEMORY} has {free} bytes free, and Triton needs {needed} to start: "
            "in a container, run it with --shm-size=1g"
        )


def _ports(*wanted: int) -> tuple[int, ...]:
    """Replace each 0 by a free port; raise TritonError if one of the others is in use."""
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
        raise TritonError(f"cannot listen at {HOST}:{port}: {error.strerror}") from error
    return port


def _bind_to_any(held: socket.socket) -> int:
    for port in random.sample(_PORTS, len(_PORTS)):
        try:
            held.bind((HOST, port))
        except OSError:
            continue
        return port
    raise TritonError(f"no port of {HOST} is free")


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        try:
            process.wait(patience)
        finally:
            # Out of patience, or interrupted: the stubs end too, they are in the server's group.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
