"""Processes that end, at the latest, when this one does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks.harness.client import BenchmarkError
from tests.integration.support.real_server import BOUND_CHILD

Cores = Collection[int]
"""The cores on which a process may run."""

_ENDS_WITHIN = 10.0


@dataclass(frozen=True, slots=True)
class Finished:
    """What a process has printed, and the CPU time that it took, in seconds."""

    output: str
    cpu_time: float


def start(
    command: Sequence[str], output: int, cores: Cores | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that ends at the latest when this one does."""
    bound = [sys.executable, "-I", "-S", str(BOUND_CHILD), str(os.getpid())]
    return subprocess.Popen(
        [*bound, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, if it has not ended by itself."""
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
        # Not wait(2): of this process alone, whatever else has ended meanwhile.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        end(process)
    if process.returncode:
        raise BenchmarkError(f"{command[0]} failed:\n{output.decode()}")
    return Finished(output.decode(), used.ru_utime + used.ru_stime)
