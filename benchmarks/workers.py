"""What a second worker adds: requests per second of two, as a multiple of one.

Where there are more than two cores, the workers have two of them, and client and server the others.
Where there are just two, client and server need some of those, and two workers cannot have a core
each. Then one worker shares one core with them, and two workers share both: so the second core
comes with the second worker, and a request costs the same of client and server in both cases.

There are connections enough for two workers to be busy: one that has done all there is sleeps, and
to wake it from another core takes, in a virtual machine, a third of the time of a request.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.children import Cores
from benchmarks.lab import Lab
from benchmarks.load import Loader, wrk_on
from benchmarks.processes import gateway_before, server
from benchmarks.ratio import Ratio
from benchmarks.report import Row, at_least
from benchmarks.rounds import go_rounds
from benchmarks.usage import cpu_time
from benchmarks.wire import Request, json_of_doubles, normal

_CONNECTIONS = 64
_LEAST = 1.8
_SECONDS = 1


@dataclass(frozen=True, slots=True)
class _Places:
    """The cores of the workers, and those of client and server."""

    workers: Cores
    others: Cores


@dataclass(frozen=True, slots=True)
class _Case:
    """A gateway at work, its own server, and what puts load on it."""

    port: int
    pid: int
    workers: tuple[int, ...]
    server_pid: int
    load: Loader


@dataclass(frozen=True, slots=True)
class _Run:
    """Answers in a second, and CPU time as shares of the time taken."""

    rate: float
    workers: tuple[float, ...]
    parent: float
    server: float
    client: float

    @property
    def rate_per_core(self) -> float:
        """Give the answers in a second of CPU time of the workers."""
        return self.rate / sum(self.workers)

    @property
    def shares(self) -> str:
        """Write the shares for the table."""
        workers = " + ".join(f"{share:.0%}" for share in self.workers)
        return f"{workers}; server {self.server:.0%}, client {self.client:.0%}"


def scaling(lab: Lab) -> list[Row]:
    """Measure small JSON requests, in front of a server that answers at once."""
    what = f"JSON 16 FP32, {_CONNECTIONS} connections, two workers to one"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return [Row(what, result="not measured: it takes two cores")]
    request = json_of_doubles("static", normal(16))
    with ExitStack() as stack:
        cases = {count: _case(stack, count, _places(cores, count)) for count in (1, 2)}
        runs = _runs(cases, request, lab.rounds(10))
    one, two = (_middle(runs[count]) for count in cases)
    ratio = Ratio.of([run.rate for run in runs[2]], [run.rate for run in runs[1]])
    each = 2 * two.rate_per_core / one.rate_per_core
    where = "" if len(cores) > 2 else ", with client and server on one core and on two"
    return [
        Row(
            what + where,
            f"one {one.rate:,.0f} /s",
            f"two {two.rate:,.0f} /s",
            f"{ratio.shown(2, 'one')}, {each:.2f} × by the workers' CPU time",
            at_least(ratio.median, _LEAST, f"{_LEAST} ×"),
        ),
        Row(
            "… CPU time of workers and others",
            one.shares,
            two.shares,
            f"the parent of the two {two.parent:.0%}",
        ),
    ]


def _places(cores: Sequence[int], workers: int) -> _Places:
    if len(cores) > 2:
        return _Places(cores[:2], cores[2:])
    return _Places(cores[:workers], cores[:workers])


def _case(stack: ExitStack, count: int, places: _Places) -> _Case:
    load = wrk_on(places.others)
    static = stack.enter_context(server("static_server", places.others))
    gateway = stack.enter_context(
        gateway_before(static.ports[1], cores=places.workers, workers=count)
    )
    workers = _children(gateway.pid) or (gateway.pid,)
    return _Case(gateway.port, gateway.pid, workers, static.pid, load)


def _children(pid: int) -> tuple[int, ...]:
    return tuple(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _runs(cases: Mapping[int, _Case], request: Request, rounds: int) -> dict[int, list[_Run]]:
    """Go some rounds, and one before unnoted."""
    for case in cases.values():
        case.load(case.port, request, _CONNECTIONS, _SECONDS)
    return go_rounds(rounds, {count: partial(_run, case, request) for count, case in cases.items()})


def _run(case: _Case, request: Request) -> _Run:
    pids = (case.server_pid, case.pid, *case.workers)
    began, before = time.perf_counter(), [cpu_time(pid) for pid in pids]
    result = case.load(case.port, request, _CONNECTIONS, _SECONDS)
    used = [cpu_time(pid) - then for pid, then in zip(pids, before, strict=True)]
    took = time.perf_counter() - began
    of_server, parent, *workers = (each / took for each in used)
    return _Run(result.rate, tuple(workers), parent, of_server, result.client_share)


def _middle(runs: Sequence[_Run]) -> _Run:
    """Give the run with the median rate."""
    middle = statistics.median_low(run.rate for run in runs)
    return next(run for run in runs if run.rate == middle)
