"""Measures how long small requests wait for large ones in the same process.

The gateway has a core to itself, so that the wait is for the gateway alone. CPU steal may still
spoil some rounds; the median of all rounds is robust against that.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.harness.client import Connection
from benchmarks.harness.cores import pinned_to, split_cores
from benchmarks.harness.environment import Environment
from benchmarks.harness.processes import running_gateway, server
from benchmarks.harness.requests import Request, json_of_shortest, normal
from benchmarks.harness.rounds import repeat
from benchmarks.report import Row, below, milliseconds
from benchmarks.servers.raw_server import model_responding

_LARGE_CLIENTS = 4
_TEXT = 16_000_000
_PER_VALUE = 10.9  # bytes, with what stands between them
_SMALL_REQUESTS = 300
_MAX_ADDED = 0.010  # seconds
_GETTING_GOING = 0.5  # seconds, after which large requests are in every stage

_Times = Sequence[float]


@dataclass(frozen=True, slots=True)
class _Round:
    """The times of small requests, and how many large ones passed meanwhile."""

    alone: _Times
    beside: _Times
    passed: int

    @property
    def added(self) -> float:
        return _p99(self.beside) - _p99(self.alone)


def waiting(env: Environment) -> list[Row]:
    """Measure the p99 of small requests alone, and beside JSON requests of 16 MB."""
    cores = split_cores()
    small = json_of_shortest(model_responding(64), normal(16))
    large = json_of_shortest(model_responding(64), normal(int(_TEXT / _PER_VALUE)))
    with (
        server("raw_server", cores.others) as raw,
        running_gateway(raw.ports[0], cores=cores.measured) as gateway,
        pinned_to(cores.others),
    ):
        _times(gateway.port, small)
        rounds = repeat(env.rounds(5), partial(_round, gateway.port, small, large))
    added = statistics.median(each.added for each in rounds)
    p99 = {
        "alone": statistics.median(_p99(each.alone) for each in rounds),
        "beside": statistics.median(_p99(each.beside) for each in rounds),
    }
    usual = statistics.median(statistics.median(each.beside) for each in rounds)
    longest = max(max(each.beside) for each in rounds)
    return [
        Row(
            f"JSON 16 FP32, p99 beside {_LARGE_CLIENTS} clients with 16 MB{cores.note}",
            "",
            f"{milliseconds(p99['beside'])}, alone {milliseconds(p99['alone'])}",
            f"{milliseconds(added)} added; p50 {milliseconds(usual)}, longest "
            f"{milliseconds(longest)}; {sum(each.passed for each in rounds)} large ones passed",
            below(added, _MAX_ADDED, milliseconds(_MAX_ADDED)),
        )
    ]


def _round(port: int, small: Request, large: Request) -> _Round:
    alone = _times(port, small)
    stop = threading.Event()
    with ThreadPoolExecutor(_LARGE_CLIENTS) as pool:
        clients = [pool.submit(_send_on, port, large, stop) for _ in range(_LARGE_CLIENTS)]
        try:
            time.sleep(_GETTING_GOING)
            beside = _times(port, small)
        finally:
            stop.set()
    return _Round(alone, beside, sum(client.result() for client in clients))


def _p99(times: _Times) -> float:
    return float(np.quantile(times, 0.99))


def _times(port: int, request: Request) -> _Times:
    with Connection(port) as connection:
        return [connection.time(request).total for _ in range(_SMALL_REQUESTS)]


def _send_on(port: int, request: Request, stop: threading.Event) -> int:
    """Send the request without pause, and return the number of responses."""
    responses = 0
    with Connection(port) as connection:
        while not stop.is_set():
            connection.time(request)
            responses += 1
    return responses
