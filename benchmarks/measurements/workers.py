"""Measures the throughput of two workers as a multiple of the throughput of one.

With more than two cores, the workers have two of them, clients and server the others. With two
cores, clients and server need a good part of both. So each worker is limited to 40 % of a core,
which leaves room for all, with one worker or two.

Each worker has the same number of connections, as more connections make each request dearer.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness.cores import limit_cpu
from benchmarks.harness.environment import Environment
from benchmarks.harness.load import LoadGenerator, LoadResult, wrk_load
from benchmarks.harness.proc_stats import cpu_time
from benchmarks.harness.processes import Cores, running_gateway, server
from benchmarks.harness.requests import Request, json_of_doubles, normal
from benchmarks.harness.rounds import Ratio, run_rounds
from benchmarks.report import Row, at_least

_CONNECTIONS = 32
"""Connections to each worker, from a client of its own."""
_MIN = 1.8
_SECONDS = 1
_SHARE = 0.4
"""The share of a core that each worker has on a machine of two cores."""


@dataclass(frozen=True, slots=True)
class _CoreShares:
    """The cores of the workers with the share of each, and the cores of clients and server."""

    workers: Cores
    share: float
    others: Cores


@dataclass(frozen=True, slots=True)
class _Case:
    """A gateway, its own server, and its load generator."""

    port: int
    pid: int
    workers: tuple[int, ...]
    server_pid: int
    load: LoadGenerator


@dataclass(frozen=True, slots=True)
class _Run:
    """Responses per second, and the CPU use of each process."""

    rate: float
    workers: tuple[float, ...]
    parent: float
    server: float
    clients: float

    @property
    def shares(self) -> str:
        """Format the CPU use for the table."""
        workers = " + ".join(f"{share:.0%}" for share in self.workers)
        return f"{workers}; server {self.server:.0%}, clients {self.clients:.0%}"


def scaling(env: Environment) -> list[Row]:
    """Measure small JSON requests, in front of a server that responds at once."""
    what = f"JSON 16 FP32, {_CONNECTIONS} connections for each worker, two to one"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return [Row(what, result="not measured: it takes two cores")]
    shares_of_cores = (
        _CoreShares(cores[:2], 1, cores[2:])
        if len(cores) > 2
        else _CoreShares(cores, _SHARE, cores)
    )
    with ExitStack() as stack:
        cases = {count: _case(stack, count, shares_of_cores) for count in (1, 2)}
        runs = _runs(cases, json_of_doubles("static", normal(16)), env.rounds(10))
    one, two = (_middle(runs[count]) for count in cases)
    ratio = Ratio.of([run.rate for run in runs[2]], [run.rate for run in runs[1]])
    return [
        Row(
            what
            if shares_of_cores.share == 1
            else f"{what}, each with {shares_of_cores.share:.0%} of a core",
            f"one {one.rate:,.0f} /s",
            f"two {two.rate:,.0f} /s",
            ratio.shown(2, "one"),
            at_least(ratio.median, _MIN, f"{_MIN} ×"),
        ),
        Row(
            "… CPU time of workers and others",
            one.shares,
            two.shares,
            f"the parent of the two {two.parent:.0%}",
        ),
    ]


def _case(stack: ExitStack, count: int, shares_of_cores: _CoreShares) -> _Case:
    load = wrk_load(shares_of_cores.others)
    static = stack.enter_context(server("static_server", shares_of_cores.others))
    gateway = stack.enter_context(
        running_gateway(static.ports[1], cores=shares_of_cores.workers, workers=count)
    )
    workers = _children(gateway.pid) or (gateway.pid,)
    if shares_of_cores.share < 1:
        for worker in workers:
            limit_cpu(worker, shares_of_cores.share)
    return _Case(gateway.port, gateway.pid, workers, static.pid, load)


def _children(pid: int) -> tuple[int, ...]:
    return tuple(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _runs(cases: Mapping[int, _Case], request: Request, rounds: int) -> dict[int, list[_Run]]:
    """Run the rounds, after one for warming up."""
    for case in cases.values():
        _run(case, request)
    return run_rounds(
        rounds, {count: partial(_run, case, request) for count, case in cases.items()}
    )


def _run(case: _Case, request: Request) -> _Run:
    pids = (case.server_pid, case.pid, *case.workers)
    began, before = time.perf_counter(), [cpu_time(pid) for pid in pids]
    loads = _loads(case, request)
    used = [cpu_time(pid) - then for pid, then in zip(pids, before, strict=True)]
    took = time.perf_counter() - began
    of_server, parent, *workers = (each / took for each in used)
    rate, clients = sum(load.rate for load in loads), sum(load.client_share for load in loads)
    return _Run(rate, tuple(workers), parent, of_server, clients)


def _loads(case: _Case, request: Request) -> list[LoadResult]:
    """Put load on the gateway from one client for each worker."""
    with ThreadPoolExecutor(len(case.workers)) as pool:
        clients = [
            pool.submit(case.load, case.port, request, _CONNECTIONS, _SECONDS) for _ in case.workers
        ]
        return [client.result() for client in clients]


def _middle(runs: Sequence[_Run]) -> _Run:
    """Return the run with the median rate."""
    middle = statistics.median_low(run.rate for run in runs)
    return next(run for run in runs if run.rate == middle)
