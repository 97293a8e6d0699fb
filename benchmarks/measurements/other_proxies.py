"""Compares requests per second on one core: the gateway, which converts, and plain proxies.

The measured proxy has a core to itself; the client and the server share the others. All proxies run
in each round, one after the other, under the same load.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import orjson

from benchmarks.harness.client import BenchmarkError, Connection, NotInstalledError
from benchmarks.harness.cores import CoreSplit, pinned_to, split_cores
from benchmarks.harness.environment import Environment
from benchmarks.harness.load import LoadGenerator, thread_load, wrk_load
from benchmarks.harness.proc_stats import busy_time, cpu_time
from benchmarks.harness.processes import running_gateway, server
from benchmarks.harness.requests import Request, Values, binary, json_of_doubles, normal
from benchmarks.harness.rounds import Ratio, run_rounds
from benchmarks.report import Row, at_least
from benchmarks.servers.proxies import envoy_before, nginx_before
from benchmarks.servers.raw_server import model_responding

_SECONDS = 1
"""Seconds of load on each target in a round; in short rounds CPU steal is alike for all."""


@dataclass(frozen=True, slots=True)
class Target:
    """A proxy and the server behind it, or the server alone."""

    port: int
    pid: int
    server_pid: int


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """The load on each target, and the cores that proxies and other processes have."""

    request: Request
    connections: int
    rounds: int
    cores: CoreSplit


@dataclass(frozen=True, slots=True)
class Result:
    """Responses per second in each round, and the median CPU use of processes and cores."""

    rates: Sequence[float]
    own: float
    server: float
    client: float
    core: float
    other_cores: float

    @property
    def rate(self) -> float:
        """Return the median of the rates."""
        return statistics.median(self.rates)

    @property
    def shares(self) -> str:
        """Format the CPU use for the table."""
        return (
            f"its core {self.core:.0%}, by it {self.own:.0%}; the others "
            f"{self.other_cores:.0%}, by server {self.server:.0%}, client {self.client:.0%}"
        )


def compare(
    targets: Mapping[str, Target], profile: LoadProfile, load: LoadGenerator
) -> dict[str, Result]:
    """Return the result of each target; each gets the load once before, for warming up."""
    for target in targets.values():
        load(target.port, profile.request, profile.connections, _SECONDS)
    jobs = {name: partial(_run, each, profile, load) for name, each in targets.items()}
    runs = run_rounds(profile.rounds, jobs)
    return {name: _median(all_runs) for name, all_runs in runs.items()}


def _run(target: Target, profile: LoadProfile, load: LoadGenerator) -> Result:
    began, before = time.perf_counter(), _used(target, profile.cores)
    result = load(target.port, profile.request, profile.connections, _SECONDS)
    used, took = _used(target, profile.cores), time.perf_counter() - began
    own, server, core, others = (
        (now - then) / took for now, then in zip(used, before, strict=True)
    )
    return Result([result.rate], own, server, result.client_share, core, others)


def _used(target: Target, cores: CoreSplit) -> tuple[float, float, float, float]:
    return (
        cpu_time(target.pid),
        cpu_time(target.server_pid),
        busy_time(cores.measured),
        busy_time(cores.others),
    )


def _median(runs: Sequence[Result]) -> Result:
    shares = ("own", "server", "client", "core", "other_cores")
    medians = (statistics.median(map(attrgetter(share), runs)) for share in shares)
    return Result([run.rate for run in runs], *medians)


_SMALL_CONNECTIONS, _SMALL_RATE = 32, 1.0
_LARGE_CONNECTIONS, _LARGE_RATE = 8, 0.8
_LARGE_COUNT = 150_000


def small(env: Environment) -> list[Row]:
    """Measure small JSON requests, which the gateway alone converts, with their responses."""
    cores = split_cores()
    load = wrk_load(cores.others)
    values = normal(16)
    request = json_of_doubles("static", values)
    with ExitStack() as stack:
        static = stack.enter_context(server("static_server", cores.others))
        json_port, binary_port = static.ports
        gateway = stack.enter_context(running_gateway(binary_port, cores=cores.measured))
        envoy = stack.enter_context(envoy_before(json_port, cores.measured))
        targets = {
            "direct": Target(json_port, static.pid, static.pid),
            "gateway": Target(gateway.port, gateway.pid, static.pid),
            "Envoy": Target(envoy.ports[0], envoy.pid, static.pid),
        }
        missing: list[Row] = []
        try:
            nginx = stack.enter_context(nginx_before(json_port, cores.measured))
            targets["nginx"] = Target(nginx.ports[0], nginx.pid, static.pid)
        except NotInstalledError as error:  # it is for information only
            missing = [Row("… nginx", result=f"not measured: {error}")]
        for target in targets.values():
            _check(target.port, request, values)
        results = compare(targets, _profile(env, request, _SMALL_CONNECTIONS, cores), load)
    what = f"JSON 16 FP32, {_SMALL_CONNECTIONS} connections"
    return _rows(what, results, _SMALL_RATE, cores) + missing


def large(env: Environment) -> list[Row]:
    """Measure binary tensors of 600 KB that pass unchanged in both directions."""
    cores = split_cores()
    values = normal(_LARGE_COUNT)
    request = binary(model_responding(values.nbytes), values)
    with ExitStack() as stack:
        raw = stack.enter_context(server("raw_server", cores.others))
        port = raw.ports[0]
        gateway = stack.enter_context(running_gateway(port, cores=cores.measured))
        envoy = stack.enter_context(envoy_before(port, cores.measured))
        targets = {
            "direct": Target(port, raw.pid, raw.pid),
            "gateway": Target(gateway.port, gateway.pid, raw.pid),
            "Envoy": Target(envoy.ports[0], envoy.pid, raw.pid),
        }
        _check_same(targets, request)
        stack.enter_context(pinned_to(cores.others))
        results = compare(targets, _profile(env, request, _LARGE_CONNECTIONS, cores), thread_load)
    what = f"binary {_LARGE_COUNT:,} FP32, {_LARGE_CONNECTIONS} connections"
    return _rows(what, results, _LARGE_RATE, cores)


def _profile(env: Environment, request: Request, connections: int, cores: CoreSplit) -> LoadProfile:
    return LoadProfile(request, connections, env.rounds(10), cores)


def _rows(what: str, results: dict[str, Result], minimum: float, cores: CoreSplit) -> list[Row]:
    direct, gateway = results.pop("direct"), results.pop("gateway")
    ratios = {name: Ratio.of(gateway.rates, other.rates) for name, other in results.items()}
    return [
        Row(
            f"{what}, one core{cores.note}",
            f"{direct.rate:,.0f} /s",
            f"{gateway.rate:,.0f} /s",
            ", ".join(
                ratios[name].shown(2, f"{name}'s {other.rate:,.0f} /s")
                for name, other in results.items()
            ),
            at_least(ratios["Envoy"].median, minimum, f"{minimum} × Envoy"),
        ),
        Row(
            "… how busy the cores were",
            f"{direct.other_cores:.0%}, by server {direct.server:.0%}, client {direct.client:.0%}",
            gateway.shares,
            ". ".join(f"{name}: {other.shares}" for name, other in results.items()),
        ),
    ]


def _check(port: int, request: Request, values: Values) -> None:
    """Raise BenchmarkError unless the target returns the tensor of the server."""
    with Connection(port) as connection:
        output = orjson.loads(connection.fetch(request).body)["outputs"][0]
    if values.astype(float).tolist() != [float(values.dtype.type(x)) for x in output["data"]]:
        raise BenchmarkError(f"this is not the tensor that the server has: {output}")


def _check_same(targets: Mapping[str, Target], request: Request) -> None:
    bodies: set[bytes] = set()
    for target in targets.values():
        with Connection(target.port) as connection:
            bodies.add(connection.fetch(request).body)
    if len(bodies) > 1:
        raise BenchmarkError("not all targets return the response of the server")
