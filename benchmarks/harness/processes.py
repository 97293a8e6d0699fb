"""Starts the measured processes and the servers that they need.

Each process ends at the latest when this one does.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.harness.client import HOST, BenchmarkError
from tests.integration.support.real_server import BOUND_CHILD

Cores = Collection[int]
"""The cores on which a process may run."""

_ENDS_WITHIN = 10.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The output of a process, and its CPU time in seconds."""

    output: str
    cpu_time: float


def start(
    command: Sequence[str],
    output: int,
    cores: Cores | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that ends at the latest when this one does.

    ``environment`` is added to this process' own.
    """
    bound = [sys.executable, "-I", "-S", str(BOUND_CHILD), str(os.getpid())]
    return subprocess.Popen(
        [*bound, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, unless it has ended; kill it if it does not obey."""
    process.terminate()
    try:
        process.wait(_ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run(command: Sequence[str], cores: Cores | None = None) -> Finished:
    """Run a program to its end."""
    process = start(command, subprocess.PIPE, cores)
    try:
        assert process.stdout is not None
        output = process.stdout.read()
        # wait4(2), as getrusage(2) would count every child.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        end(process)
    if process.returncode:
        raise BenchmarkError(f"{command[0]} failed:\n{output.decode()}")
    return Finished(output.decode(), used.ru_utime + used.ru_stime)


TENSORGATE = (str(Path(sys.executable).with_name("tensorgate")), "serve")
"""The command that users start."""
_FROM_SOURCES = {"PYTHONPATH": str(Path(__file__).parents[2])}
"""Has the command import the checkout, even if this process has the gateway compiled."""

_LISTENING = re.compile(r"listening on http://[0-9.]+:([0-9]+)")
_STARTS_WITHIN = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """A process that listens."""

    ports: tuple[int, ...]
    pid: int


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that runs."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self.process.pid

    def stop(self) -> str:
        """Terminate it and return its output."""
        end(self.process)
        return self.log.read_text()


@contextmanager
def running_gateway(
    server_port: int,
    command: Sequence[str] = TENSORGATE,
    cores: Cores | None = None,
    workers: int = 1,
    offload: int | str = "auto",
    dialect: str = "triton",
    access_log: bool = False,
    from_sources: bool = False,
    scheme: str = "http",
    tracing: Mapping[str, str] | None = None,
    shared: Mapping[str, str] | None = None,
) -> Iterator[Gateway]:
    """Run a gateway in front of a server, without limits on sizes; ``shared`` is shared_memory.

    ``scheme`` is the server's protocol, ``http`` or ``grpc``. ``command`` takes the settings as
    ``--config FILE`` and logs where it listens. With ``from_sources``, the gateway is not
    compiled, as an installation without a compiler gives it.
    """
    settings = {
        "listen": f"{HOST}:0",
        "workers": workers,
        "offload": offload,
        "upstreams": {
            "server": {
                "endpoints": [f"{scheme}://{HOST}:{server_port}"],
                "dialect": dialect,
                **({} if shared is None else {"shared_memory": dict(shared)}),
            }
        },
        "limits": {"max_request_bytes": "4GiB"},
        "log": {"access": access_log},
        **({} if tracing is None else {"tracing": dict(tracing)}),
    }
    with tempfile.TemporaryDirectory(prefix="tensorgate-bench-") as name:
        config, log = Path(name, "gateway.yaml"), Path(name, "log")
        config.write_text(yaml.safe_dump(settings))
        with log.open("wb") as output:
            environment = _FROM_SOURCES if from_sources else None
            process = start(
                [*command, "--config", str(config)], output.fileno(), cores, environment
            )
        try:
            yield Gateway(_listening_port(process, log), process, log)
        finally:
            end(process)


@contextmanager
def server(module: str, cores: Cores | None = None) -> Iterator[Server]:
    """Run a server of ``benchmarks.servers``, which prints its ports in a line."""
    process = start([sys.executable, "-m", f"benchmarks.servers.{module}"], subprocess.PIPE, cores)
    try:
        assert process.stdout is not None
        yield Server(tuple(map(int, process.stdout.readline().split())), process.pid)
    finally:
        end(process)


@contextmanager
def listening(
    command: Sequence[str], port: int, log: Path, cores: Cores | None = None
) -> Iterator[Server]:
    """Run a program and wait until it listens at ``port``; ``log`` gets its output."""
    with log.open("wb") as output:
        process = start(command, output.fileno(), cores)
    try:
        deadline = time.monotonic() + _STARTS_WITHIN
        while not _accepts(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"{command[0]} did not start:\n{log.read_text()}")
            time.sleep(0.02)
        yield Server((port,), process.pid)
    finally:
        end(process)


def free_port() -> int:
    """Find a port on which nobody listens."""
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])


def _accepts(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), 1.0).close()
    except ConnectionRefusedError:
        return False
    return True


def _listening_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + _STARTS_WITHIN
    while (found := _LISTENING.search(log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"the gateway did not start:\n{log.read_text()}")
        time.sleep(0.02)
    return int(found[1])
