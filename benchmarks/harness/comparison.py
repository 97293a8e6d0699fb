"""The gateway and other proxies under the same load, one after the other on the same core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from benchmarks.harness.cores import Division
from benchmarks.harness.load import Loader
from benchmarks.harness.proc_stats import busy_time, cpu_time
from benchmarks.harness.requests import Request
from benchmarks.harness.rounds import go_rounds

_SECONDS = 1
"""How long each runs in a round: the shorter, the more alike is what the machine gives them."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A proxy, or the server alone; ``server_pid`` is the one behind the proxy."""

    port: int
    pid: int
    server_pid: int


@dataclass(frozen=True, slots=True)
class Course:
    """What each contender has to do, and where: ``cores`` are those that all were started on."""

    request: Request
    connections: int
    rounds: int
    cores: Division


@dataclass(frozen=True, slots=True)
class Standing:
    """Answers in a second, and CPU time of processes and cores as shares of the time taken.

    All are medians but ``rates``, which are those of each round.
    """

    rates: Sequence[float]
    own: float
    server: float
    client: float
    core: float
    other_cores: float

    @property
    def rate(self) -> float:
        """Give the median of the rates."""
        return statistics.median(self.rates)

    @property
    def shares(self) -> str:
        """Write the shares for the table."""
        return (
            f"its core {self.core:.0%}, by it {self.own:.0%}; the others "
            f"{self.other_cores:.0%}, by server {self.server:.0%}, client {self.client:.0%}"
        )


def contest(
    contenders: Mapping[str, Contender], course: Course, load: Loader
) -> dict[str, Standing]:
    """Give what each comes to in some rounds.

    All run in each round, every second one backwards, and once before unnoted.
    """
    for contender in contenders.values():
        load(contender.port, course.request, course.connections, _SECONDS)
    ways = {name: partial(_run, each, course, load) for name, each in contenders.items()}
    runs = go_rounds(course.rounds, ways)
    return {name: _together(all_runs) for name, all_runs in runs.items()}


def _run(contender: Contender, course: Course, load: Loader) -> Standing:
    began, before = time.perf_counter(), _used(contender, course.cores)
    result = load(contender.port, course.request, course.connections, _SECONDS)
    used, took = _used(contender, course.cores), time.perf_counter() - began
    own, server, core, others = (
        (now - then) / took for now, then in zip(used, before, strict=True)
    )
    return Standing([result.rate], own, server, result.client_share, core, others)


def _used(contender: Contender, cores: Division) -> tuple[float, float, float, float]:
    return (
        cpu_time(contender.pid),
        cpu_time(contender.server_pid),
        busy_time(cores.measured),
        busy_time(cores.others),
    )


def _together(runs: Sequence[Standing]) -> Standing:
    shares = ("own", "server", "client", "core", "other_cores")
    medians = (statistics.median(map(attrgetter(share), runs)) for share in shares)
    return Standing([run.rate for run in runs], *medians)
