"""The processes that are measured, and what the kernel knows of their memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

import tests.integration.triton.server as triton_harness
from benchmarks.client import HOST, BenchmarkError

TENSORGATE = (str(Path(sys.executable).with_name("tensorgate")), "serve")
"""The command that users start."""

_BOUND_CHILD = Path(triton_harness.__file__).with_name("bound_child.py")
_LISTENING = re.compile(r"listening on http://[0-9.]+:([0-9]+)")
_STARTS_WITHIN = 30.0
_ENDS_WITHIN = 10.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that runs."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> str:
        """End it and give all that it has printed."""
        _end(self.process)
        return self.log.read_text()


class PeakMemory:
    """How much a process' memory grows from now on, at its peak: proc(5), VmHWM."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5")  # forget the peak so far
        self._start = self._status("VmRSS")

    def growth(self) -> int:
        """Give the bytes."""
        return self._status("VmHWM") - self._start

    def _status(self, field: str) -> int:
        text = (self._folder / "status").read_text()
        found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


@contextmanager
def gateway_before(server_port: int, command: Sequence[str] = TENSORGATE) -> Iterator[Gateway]:
    """Run a gateway in front of a server, with the limits on sizes out of the way.

    ``command`` takes the settings as ``--config FILE`` and logs where it listens.
    """
    settings = {
        "listen": f"{HOST}:0",
        "upstreams": {
            "server": {"endpoints": [f"http://{HOST}:{server_port}"], "dialect": "triton"}
        },
        "limits": {"request_bytes": "4GiB"},
        "log": {"access": False},
    }
    with tempfile.TemporaryDirectory(prefix="tensorgate-bench-") as name:
        config, log = Path(name, "gateway.yaml"), Path(name, "log")
        config.write_text(yaml.safe_dump(settings))
        with log.open("wb") as output:
            process = _start([*command, "--config", str(config)], output.fileno())
        try:
            yield Gateway(_listening_port(process, log), process, log)
        finally:
            _end(process)


@contextmanager
def raw_server() -> Iterator[int]:
    """Run the raw server; give its port."""
    process = _start([sys.executable, "-m", "benchmarks.raw_server"], subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        _end(process)


def _start(command: Sequence[str], output: int) -> subprocess.Popen[bytes]:
    """Start a process that ends at the latest when this one does."""
    bound = [sys.executable, "-I", "-S", str(_BOUND_CHILD), str(os.getpid())]
    return subprocess.Popen(
        [*bound, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )


def _listening_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + _STARTS_WITHIN
    while (found := _LISTENING.search(log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"the gateway did not start:\n{log.read_text()}")
        time.sleep(0.02)
    return int(found[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
