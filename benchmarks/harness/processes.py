"""The processes that are measured, and those that they need."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.harness.client import HOST, BenchmarkError
from benchmarks.harness.subprocesses import Cores, end, start

TENSORGATE = (str(Path(sys.executable).with_name("tensorgate")), "serve")
"""The command that users start."""

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
        """End it and give all that it has printed."""
        end(self.process)
        return self.log.read_text()


@contextmanager
def running_gateway(
    server_port: int,
    command: Sequence[str] = TENSORGATE,
    cores: Cores | None = None,
    workers: int = 1,
    helper: str = "auto",
    dialect: str = "triton",
) -> Iterator[Gateway]:
    """Run a gateway in front of a server, with the limits on sizes out of the way.

    ``command`` takes the settings as ``--config FILE`` and logs where it listens.
    """
    settings = {
        "listen": f"{HOST}:0",
        "workers": workers,
        "offload": helper,
        "upstreams": {
            "server": {"endpoints": [f"http://{HOST}:{server_port}"], "dialect": dialect}
        },
        "limits": {"request_bytes": "4GiB"},
        "log": {"access": False},
    }
    with tempfile.TemporaryDirectory(prefix="tensorgate-bench-") as name:
        config, log = Path(name, "gateway.yaml"), Path(name, "log")
        config.write_text(yaml.safe_dump(settings))
        with log.open("wb") as output:
            process = start([*command, "--config", str(config)], output.fileno(), cores)
        try:
            yield Gateway(_listening_port(process, log), process, log)
        finally:
            end(process)


@contextmanager
def server(module: str, cores: Cores | None = None) -> Iterator[Server]:
    """Run a server of this package, which prints its ports in a line."""
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
    """Run a program that listens where it was told to, from when it does; ``log`` gets its text."""
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
