"""Measures how long calls take over many connections, compared with Envoy.

The measured proxy has a core to itself; client and server share the others. In each round 1,000
clients connect at once and call without pause. Then 500 connect at once while 300 others call
without pause. A proxy that accepts slowly leaves clients waiting for seconds.
"""

from __future__ import annotations

import select
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.harness.client import HOST, BenchmarkError
from benchmarks.harness.cores import CoreSplit, pinned_to, split_cores
from benchmarks.harness.environment import Environment
from benchmarks.harness.load import LoadGenerator, wrk_load
from benchmarks.harness.proc_stats import cpu_time
from benchmarks.harness.processes import running_gateway, server
from benchmarks.harness.requests import Request, json_of_doubles, normal
from benchmarks.harness.rounds import Ratio, run_rounds
from benchmarks.report import Row, at_most, milliseconds
from benchmarks.servers.proxies import envoy_before

_MANY, _FEW = 1_000, 32
_BURST, _BUSY = 500, 300
_SECONDS = 5.0
_BUSY_SECONDS, _SETTLED = 4, 2.0  # after which the busy connections are all open
_PATIENCE = 15.0

_MAX_P99 = 1.5  # × Envoy's
_MAX_CALL = 1.0  # seconds
_MAX_COST = 1.3  # × the CPU time of a call over few connections


@dataclass(frozen=True, slots=True)
class _Target:
    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class _Calls:
    """The seconds of each call, the first one of a connection from its connect on."""

    times: Sequence[float]
    cpu_time: float

    @property
    def p50(self) -> float:
        return statistics.median(self.times)

    @property
    def p99(self) -> float:
        return float(np.quantile(self.times, 0.99))

    @property
    def longest(self) -> float:
        return max(self.times)

    @property
    def cost(self) -> float:
        """Return the CPU time of the proxy for a call."""
        return self.cpu_time / len(self.times)


def rows(env: Environment) -> list[Row]:
    """Measure small JSON requests over many connections."""
    cores = split_cores()
    request = json_of_doubles("static", normal(16))
    with ExitStack() as stack:
        static = stack.enter_context(server("static_server", cores.others))
        json_port, binary_port = static.ports
        gateway = stack.enter_context(running_gateway(binary_port, cores=cores.measured))
        envoy = stack.enter_context(envoy_before(json_port, cores.measured))
        stack.enter_context(pinned_to(cores.others))
        targets = {
            "gateway": _Target(gateway.port, gateway.pid),
            "Envoy": _Target(envoy.ports[0], envoy.pid),
        }
        for target in targets.values():
            _call(target, request, _FEW, 1.0)
        steady = {
            (name, count): partial(_call, target, request, count, _SECONDS)
            for name, target in targets.items()
            for count in (_MANY, _FEW)
        }
        load = wrk_load(cores.others)
        bursts = {name: partial(_burst, target, request, load) for name, target in targets.items()}
        of_steady = run_rounds(env.rounds(5), steady)
        of_bursts = run_rounds(env.rounds(5), bursts)
    many = {name: of_steady[name, _MANY] for name in targets}
    few = of_steady["gateway", _FEW]
    costs = Ratio.of([each.cost for each in many["gateway"]], [each.cost for each in few])
    return [
        *_latency_rows(f"{_MANY:,} connections", many, cores),
        Row(
            f"… CPU time of a call, relative to {_FEW} connections",
            "",
            f"{_median_cost(many['gateway'])}, over {_FEW} connections {_median_cost(few)}",
            costs.shown(2, f"that over {_FEW}"),
            at_most(costs.median, _MAX_COST, f"{_MAX_COST} ×"),
        ),
        *_latency_rows(f"{_BURST} connections at once beside {_BUSY} busy ones", of_bursts, cores),
    ]


def _latency_rows(what: str, runs: dict[str, list[_Calls]], cores: CoreSplit) -> list[Row]:
    gateway, envoy = runs["gateway"], runs["Envoy"]
    p99 = Ratio.of([each.p99 for each in gateway], [each.p99 for each in envoy])
    longest, envoys = (max(each.longest for each in calls) for calls in (gateway, envoy))
    slow = sum(time > _MAX_CALL for calls in gateway for time in calls.times)
    return [
        Row(
            f"{what}: p99 of JSON 16 FP32, one core{cores.note}",
            "",
            f"{_median(gateway, 'p99')}, p50 {_median(gateway, 'p50')}",
            p99.shown(2, f"Envoy's {_median(envoy, 'p99')}") + f", p50 {_median(envoy, 'p50')}",
            at_most(p99.median, _MAX_P99, f"{_MAX_P99} × Envoy's"),
        ),
        Row(
            "… longest call",
            "",
            f"{milliseconds(longest)}, {slow} calls over {_MAX_CALL:g} s",
            f"Envoy's {milliseconds(envoys)}",
            at_most(longest, _MAX_CALL, f"{_MAX_CALL:g} s"),
        ),
    ]


def _median(runs: Sequence[_Calls], what: str) -> str:
    return milliseconds(statistics.median(getattr(each, what) for each in runs))


def _median_cost(runs: Sequence[_Calls]) -> str:
    return f"{statistics.median(each.cost for each in runs) * 1e6:.0f} µs"


def _burst(target: _Target, request: Request, load: LoadGenerator) -> _Calls:
    """Connect at once, and call once over each connection, beside busy connections."""
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(load, target.port, request, _BUSY, _BUSY_SECONDS)
        time.sleep(_SETTLED)
        calls = _call(target, request, _BURST, 0.0)
        busy.result()
    return calls


def _call(target: _Target, request: Request, connections: int, seconds: float) -> _Calls:
    """Connect at once; call over each connection without pause, but once at least."""
    text = b"".join(request.wire)
    times: list[float] = []
    began_with = cpu_time(target.pid)
    with select.epoll() as epoll, ExitStack() as stack:
        clients: dict[int, tuple[socket.socket, float]] = {}
        began = time.perf_counter()
        for _ in range(connections):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            clients[sock.fileno()] = sock, time.perf_counter()
            sock.connect_ex((HOST, target.port))
            epoll.register(sock, select.EPOLLOUT)
        until = began + seconds
        while clients:
            if time.perf_counter() > max(until, began) + _PATIENCE:
                raise BenchmarkError(f"{len(clients)} of {connections} clients got no response")
            for descriptor, event in epoll.poll(1.0, connections):
                sock, started = clients[descriptor]
                if event & select.EPOLLIN:
                    _receive(sock)
                    now = time.perf_counter()
                    times.append(now - started)
                    if now > until:
                        epoll.unregister(descriptor)
                        del clients[descriptor]
                        continue
                    clients[descriptor] = sock, now
                else:  # it is connected
                    epoll.modify(descriptor, select.EPOLLIN)
                sock.send(text)
    return _Calls(times, cpu_time(target.pid) - began_with)


def _receive(sock: socket.socket) -> None:
    """Receive a response, which is small enough to come at once."""
    response = sock.recv(65536)
    if not response.startswith(b"HTTP/1.1 200 "):
        raise BenchmarkError(f"not the response that was expected: {response[:500]!r}")
