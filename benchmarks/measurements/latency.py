"""Measures the latency that an idle gateway adds to one call at a time.

Gateway and server share a core, as in one pod, and the client has the others. Without pinning, the
three share cores differently in each run. Waking a sleeping core takes as long in a virtual machine
as all the gateway's work, and would count twice or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.harness.client import Connection
from benchmarks.harness.cores import pinned_to, split_cores
from benchmarks.harness.environment import Environment, medians, time_jobs
from benchmarks.harness.processes import running_gateway, server
from benchmarks.harness.requests import Request, binary, json_of_doubles, normal
from benchmarks.harness.rounds import difference
from benchmarks.measurements.conversion.json_speed import IMAGE_COUNT
from benchmarks.report import Bound, Row, at_most, below, milliseconds
from benchmarks.servers.proxies import envoy_before
from tests.integration.triton.models import named
from tests.integration.triton.server import TritonServer

_MAX_ADDED = 0.0002  # seconds
_MAX_ADDED_TO_TRITON = 0.00012
_MODEL = "identity_fp32"
_BINARY_ROUNDS = {16: 1500, 16_384: 600, IMAGE_COUNT: 300}


def added(env: Environment) -> list[Row]:
    """Compare with a server that has its JSON response ready, one request at a time."""
    request = json_of_doubles("static", normal(16))
    cores = split_cores()
    with server("static_server", cores.measured) as static:
        json_port, binary_port = static.ports
        with (
            running_gateway(binary_port, cores=cores.measured) as gateway,
            Connection(gateway.port) as to_gateway,
            Connection(json_port) as to_server,
            pinned_to(cores.others),
        ):
            times = time_jobs(
                env.rounds(3000),
                {
                    "direct": lambda: to_server.time(request),
                    "gateway": lambda: to_gateway.time(request),
                },
            )
    took = medians(times)
    added = took["gateway"] - took["direct"]
    return [
        Row(
            f"JSON 16 FP32, the server's response ready, client apart{cores.note}",
            milliseconds(took["direct"]),
            milliseconds(took["gateway"]),
            f"{milliseconds(added)} added",
            below(added, _MAX_ADDED, milliseconds(_MAX_ADDED)),
        )
    ]


def before_triton(env: Environment) -> list[Row]:
    """Compare with Triton alone and with Envoy before it, both proxies with their defaults."""
    cores = split_cores()
    with ExitStack() as stack:
        with pinned_to(cores.measured):
            triton = stack.enter_context(TritonServer(named(_MODEL))).http_port
        gateway = running_gateway(triton, cores=cores.measured, access_log=True)
        envoy = envoy_before(triton, cores.measured, access_log=True)
        ports = {
            "direct": triton,
            "gateway": stack.enter_context(gateway).port,
            "Envoy": stack.enter_context(envoy).ports[0],
        }
        stack.enter_context(pinned_to(cores.others))
        to = {name: stack.enter_context(Connection(port)) for name, port in ports.items()}
        rows = []
        for count, rounds in _BINARY_ROUNDS.items():
            times = _times(to, binary(_MODEL, normal(count)), env.rounds(rounds))
            envoys = _added(times, "Envoy")
            most = at_most(_added(times, "gateway"), envoys, f"Envoy's {milliseconds(envoys)}")
            rows.append(_row(f"binary {count:,} FP32 to Triton", times, most))
        times = _times(to, json_of_doubles(_MODEL, normal(16)), env.rounds(1500))
        most = below(
            _added(times, "gateway"), _MAX_ADDED_TO_TRITON, milliseconds(_MAX_ADDED_TO_TRITON)
        )
        rows.append(_row("JSON 16 FP32 to Triton", times, most))
    return rows


def _times(
    to: Mapping[str, Connection], request: Request, rounds: int
) -> Mapping[str, Sequence[float]]:
    jobs = {name: partial(connection.time, request) for name, connection in to.items()}
    return time_jobs(rounds, jobs)


def _added(times: Mapping[str, Sequence[float]], proxy: str) -> float:
    return difference(times[proxy], times["direct"])


def _row(what: str, times: Mapping[str, Sequence[float]], bound: Bound) -> Row:
    took = medians(times)
    return Row(
        f"{what}, one call at a time",
        milliseconds(took["direct"]),
        milliseconds(took["gateway"]),
        f"{milliseconds(_added(times, 'gateway'))} added, Envoy adds "
        f"{milliseconds(_added(times, 'Envoy'))}",
        bound,
    )
