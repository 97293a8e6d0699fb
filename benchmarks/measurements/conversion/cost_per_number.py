"""Measures the time per number in small and in large JSON requests."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from itertools import chain

from benchmarks.harness.client import Connection
from benchmarks.harness.environment import Environment
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import Request, json_of_shortest, normal
from benchmarks.harness.rounds import run_rounds
from benchmarks.report import Row, below
from benchmarks.servers.raw_server import model_responding

_MAX_UNEVEN = 1.5


@dataclass(frozen=True, slots=True)
class _Size:
    """A number of FP32 values, and how many requests of it each round sends."""

    name: str
    count: int
    times: int


_SIZES = (
    _Size("1 k", 1_000, 100),
    _Size("10 k", 10_000, 40),
    _Size("100 k", 100_000, 6),
    _Size("1 M", 1_000_000, 2),
    _Size("10 M", 10_000_000, 1),
)


def cost(env: Environment) -> list[Row]:
    """Measure the time per number, less what a request of one number takes.

    The bound is for one thread alone: offloading makes large requests cheaper, and only those.
    """
    alone, alone_each = _per_number(env, 0)
    _, helped_each = _per_number(env, 1)
    sizes = ", ".join(size.name for size in _SIZES)
    ratio = max(alone_each) / min(alone_each)
    return [
        Row(
            f"JSON → JSON, per number, in requests of {sizes} FP32",
            "",
            _shown(alone_each),
            f"{ratio:.2f} × from least to most, {alone * 1e3:.2f} ms per request aside",
            below(ratio, _MAX_UNEVEN, f"{_MAX_UNEVEN} ×"),
        ),
        Row("… with an offload thread", "", _shown(helped_each), ""),
    ]


def _per_number(env: Environment, offload: int) -> tuple[float, list[float]]:
    """Return the seconds of a request of one number, and the seconds per number of each size."""
    one = _to_and_fro(1)
    requests = {size: _to_and_fro(size.count) for size in _SIZES}
    gateway_running = running_gateway(env.raw_port, offload=offload)
    with gateway_running as gateway, Connection(gateway.port) as to_gateway:
        for request in (one, *requests.values()):
            to_gateway.time(request)
        ways = {size: partial(_times, to_gateway, one, requests[size], size) for size in _SIZES}
        rounds = run_rounds(env.rounds(5), ways)
    pairs = {size: list(chain.from_iterable(each)) for size, each in rounds.items()}
    alone = statistics.median(aside for each in pairs.values() for aside, _ in each)
    return alone, [
        statistics.median(more for _, more in pairs[size]) / (size.count - 1) for size in _SIZES
    ]


def _times(
    to_gateway: Connection, one: Request, request: Request, size: _Size
) -> list[tuple[float, float]]:
    """Give, as often as for this size, what one number takes, and how much longer the request.

    They are sent next to each other: a machine has its phases.
    """
    pairs = []
    for _ in range(size.times):
        aside = to_gateway.time(one).total
        pairs.append((aside, to_gateway.time(request).total - aside))
    return pairs


def _shown(per_number: list[float]) -> str:
    return f"{', '.join(f'{each * 1e9:.0f}' for each in per_number)} ns"


def _to_and_fro(count: int) -> Request:
    values = normal(count)
    return json_of_shortest(model_responding(values.nbytes), values)
