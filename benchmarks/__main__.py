"""Measures and prints the table: python -m benchmarks [--quick] [--only NAME]."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from benchmarks import report
from benchmarks.harness.client import BenchmarkError, NotInstalledError
from benchmarks.harness.environment import Environment
from benchmarks.harness.machine_speed import MachineSpeed
from benchmarks.measurements import (
    cache_floods,
    clients,
    event_loop,
    fairness,
    grpc_calls,
    hostile_traffic,
    idle_connections,
    large_bodies,
    latency,
    many_connections,
    other_proxies,
    request_rate,
    shared_memory,
    tracing,
    traffic,
    workers,
)
from benchmarks.measurements.conversion import (
    cost_per_number,
    datatypes,
    elements,
    json_speed,
    python_servers,
)
from tests.integration.environment import MissingServerError
from tests.integration.support.real_server import ServerError

MEASUREMENTS: dict[str, Callable[[Environment], list[report.Row]]] = {
    "image": json_speed.image,
    "million": json_speed.million,
    "nested": json_speed.nested,
    "nan": json_speed.nonfinite,
    "fp16": json_speed.half,
    "small": json_speed.small,
    "datatypes": datatypes.rows,
    "elements": elements.rows,
    "kserve": python_servers.kserve,
    "mlserver": python_servers.mlserver,
    "pass-through": large_bodies.pass_through,
    "text": large_bodies.text,
    "answer": large_bodies.response,
    "event-loop": event_loop.holds,
    "rate": request_rate.rate,
    "envoy": other_proxies.small,
    "traffic": traffic.rows,
    "binary": other_proxies.large,
    "grpc": grpc_calls.small,
    "grpc-binary": grpc_calls.large,
    "grpc-stream": grpc_calls.stream,
    "grpc-json": grpc_calls.json,
    "latency": latency.added,
    "latency-triton": latency.before_triton,
    "clients": clients.rows,
    "clients-image": clients.image,
    "fairness": fairness.waiting,
    "cache-floods": cache_floods.rows,
    "flat": cost_per_number.cost,
    "many-connections": many_connections.rows,
    "idle": idle_connections.connections,
    "hostile": hostile_traffic.memory,
    "shared-memory": shared_memory.rows,
    "shared-memory-1gib": shared_memory.largest,
    "workers": workers.scaling,
    "tracing": tracing.cost,
}
ON_DEMAND: dict[str, Callable[[Environment], list[report.Row]]] = {
    "traffic-same-head": traffic.same_head,
    "traffic-not-logged": traffic.not_logged,
    "traffic-same-head-not-logged": traffic.same_head_not_logged,
}
"""Measured only if named: they have no bounds, and show what a default costs."""
_ALL = MEASUREMENTS | ON_DEMAND


def main() -> None:
    """Print the table; exit with 1 and the missed bounds, if there are any."""
    arguments = _parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _stop)
    try:
        rows = _measure(arguments.only or list(MEASUREMENTS), arguments.quick)
    except KeyboardInterrupt:
        sys.exit(130)
    except (BenchmarkError, ServerError, MissingServerError) as error:
        sys.exit(str(error))
    sys.exit("\n".join(report.missed(rows)) or 0)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what the gateway costs and gains. Exits with 1 if a bound is missed.",
    )
    parser.add_argument("--quick", action="store_true", help="go fewer rounds")
    parser.add_argument(
        "--only",
        action="append",
        choices=_ALL,
        metavar="NAME",
        help=f"measure just this, may be repeated: {', '.join(_ALL)}",
    )
    return parser.parse_args(words)


def _measure(names: list[str], quick: bool) -> list[report.Row]:
    rows: list[report.Row] = []
    machine_speed = MachineSpeed()
    with Environment(quick) as env:
        for name in names:
            machine_speed.sample()
            began = time.monotonic()
            print(f"measuring: {name} ...", end="", file=sys.stderr, flush=True)
            rows += _rows(name, env)
            print(f" {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        machine = report.machine(env.triton_version)
    rows.append(machine_speed.row())
    print(report.markdown(rows, machine))
    return rows


def _rows(name: str, env: Environment) -> list[report.Row]:
    try:
        return _ALL[name](env)
    except NotInstalledError as error:
        return [report.Row(name, result=f"not measured: {error}")]


def _stop(_signal: int, _frame: FrameType | None) -> None:
    # An exception, so that what was started is stopped on the way out.
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
