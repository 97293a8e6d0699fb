"""Measure and print the table: python -m benchmarks [--quick] [--only NAME]."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from benchmarks import (
    envoy,
    event_loop,
    fairness,
    flat,
    hostile,
    idle,
    kserve,
    latency,
    memory,
    rate,
    report,
    speed,
    workers,
)
from benchmarks.client import BenchmarkError, NotInstalledError
from benchmarks.lab import Lab
from benchmarks.steadiness import Steadiness
from tests.integration.environment import MissingServerError
from tests.integration.real_server import ServerError

MEASUREMENTS: dict[str, Callable[[Lab], list[report.Row]]] = {
    "image": speed.image,
    "million": speed.million,
    "nested": speed.nested,
    "nan": speed.nonfinite,
    "fp16": speed.half,
    "small": speed.small,
    "kserve": kserve.image,
    "pass-through": memory.pass_through,
    "text": memory.text,
    "answer": memory.answer,
    "event-loop": event_loop.holds,
    "rate": rate.rate,
    "envoy": envoy.small,
    "binary": envoy.large,
    "latency": latency.added,
    "fairness": fairness.waiting,
    "flat": flat.cost,
    "idle": idle.connections,
    "hostile": hostile.memory,
    "workers": workers.scaling,
}


def main() -> None:
    """Print the table; exit with 1 and name them, if bounds are missed."""
    arguments = _parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _leave)
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
        choices=MEASUREMENTS,
        metavar="NAME",
        help=f"measure just this, may be repeated: {', '.join(MEASUREMENTS)}",
    )
    return parser.parse_args(words)


def _measure(names: list[str], quick: bool) -> list[report.Row]:
    rows: list[report.Row] = []
    steadiness = Steadiness()
    with Lab(quick) as lab:
        for name in names:
            steadiness.note()
            began = time.monotonic()
            print(f"measuring: {name} ...", end="", file=sys.stderr, flush=True)
            rows += _rows(name, lab)
            print(f" {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        machine = report.machine(lab.triton_version)
    rows.append(steadiness.row())
    print(report.markdown(rows, machine))
    return rows


def _rows(name: str, lab: Lab) -> list[report.Row]:
    try:
        return MEASUREMENTS[name](lab)
    except NotInstalledError as error:
        return [report.Row(name, result=f"not measured: {error}")]


def _leave(_signal: int, _frame: FrameType | None) -> None:
    # An exception, so that what was started is stopped on the way out.
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
