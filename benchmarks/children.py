"""Processes that end, at the latest, when this one does."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks.client import BenchmarkError
from tests.integration.real_server import BOUND_CHILD

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
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = start(command, subprocess.PIPE, cores)
    try:
        output, _ = process.communicate()
    finally:
        end(process)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise BenchmarkError(f"{command[0]} failed:\n{output.decode()}")
    took = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Finished(output.decode(), took)
