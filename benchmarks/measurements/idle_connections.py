"""Measures the memory of idle connections."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness.client import BenchmarkError, Connection
from benchmarks.harness.environment import Environment
from benchmarks.harness.proc_stats import PeakMemory
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import json_of_shortest, normal
from benchmarks.report import Row, below
from benchmarks.servers.raw_server import model_responding

_IDLE = 10_000
_MAX_PER_IDLE = 20 * 1024
_OTHER_FILES = 256  # that a process has open besides its connections
_SMALL_SCRATCH = 4096


def connections(env: Environment) -> list[Row]:
    """Measure the memory of keep-alive connections that have each sent a small request."""
    request = json_of_shortest(model_responding(64), normal(16))
    wanted = env.rounds(_IDLE)
    with ExitStack() as stack:
        allowed = stack.enter_context(_many_files()) - _OTHER_FILES
        count = min(wanted, allowed)
        gateway = stack.enter_context(running_gateway(env.raw_port))
        with Connection(gateway.port) as first:
            for _ in range(200):
                first.time(request)
            memory = PeakMemory(gateway.pid)
            for _ in range(count):
                connection = Connection(gateway.port, _SMALL_SCRATCH)
                stack.enter_context(connection).time(request)
            growth = memory.growth()
            first.time(request)
        still_open = len(list(Path(f"/proc/{gateway.pid}/fd").iterdir()))
    if still_open < count:
        raise BenchmarkError(f"the gateway has {still_open} open files for {count} connections")
    each = growth / count
    fewer = "" if count == wanted else f" (no more files may be opened, {wanted:,} were wanted)"
    return [
        Row(
            f"{count:,} idle connections{fewer}: memory of each",
            "",
            f"{each / 1024:.1f} KiB",
            bound=below(each, _MAX_PER_IDLE, f"{_MAX_PER_IDLE // 1024} KiB"),
        )
    ]


@contextmanager
def _many_files() -> Iterator[int]:
    """Raise the limit of open files to its maximum, for child processes too, and return it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    maximum = before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    try:
        yield maximum
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
