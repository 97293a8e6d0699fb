"""Measures for how long one call blocks the event loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.harness.client import BenchmarkError, Connection
from benchmarks.harness.environment import Environment
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import Request, json_of_doubles, json_of_shortest, normal, with_nan
from benchmarks.harness.rounds import repeat
from benchmarks.measurements.conversion.json_speed import NAN_SHARE
from benchmarks.report import Row, below
from benchmarks.servers.raw_server import model_responding
from benchmarks.servers.timed_gateway import RESULT_MARK

_COMMAND = (sys.executable, "-m", "benchmarks.servers.timed_gateway")
_TEXT = 16_000_000
_TIMES = 4
"""How often each request is sent in a round."""
_MAX, _MAX_P999 = 5.0, 1.0  # milliseconds
_PER_VALUE_SHORTEST, _PER_VALUE_OF_DOUBLE = 10.9, 20.6  # bytes, with what stands between them


def holds(env: Environment) -> list[Row]:
    """Measure the time slices during the conversion of 16 MB JSON requests and their responses."""
    count = env.rounds(3)
    requests = _requests() * _TIMES
    slices = np.concatenate(repeat(count, partial(_slices, env.raw_port, requests)))
    longest, most = float(slices.max()), float(np.quantile(slices, 0.999))
    return [
        Row(
            f"event loop blocked, {count * len(requests)} JSON requests of 16 MB",
            "",
            f"{longest:.2f} ms",
            f"the longest of {len(slices)} slices; p50 {np.quantile(slices, 0.5):.2f} ms",
            below(longest, _MAX, f"{_MAX:.0f} ms"),
        ),
        Row("… p99.9", "", f"{most:.2f} ms", "", below(most, _MAX_P999, f"{_MAX_P999:.0f} ms")),
    ]


def _slices(raw_port: int, requests: Sequence[Request]) -> NDArray[np.float64]:
    """Return the milliseconds of each busy time slice of a gateway's event loop."""
    with running_gateway(raw_port, _COMMAND) as gateway:
        with Connection(gateway.port) as to_gateway:
            for request in requests:
                to_gateway.time(request)
        printed = gateway.stop()
    _, mark, result = printed.partition(RESULT_MARK)
    if not mark:
        raise BenchmarkError(f"the timed gateway failed:\n{printed}")
    return np.array(orjson.loads(result)) / 1e6


def _requests() -> list[Request]:
    many = normal(int(_TEXT / _PER_VALUE_SHORTEST))
    fewer = normal(int(_TEXT / _PER_VALUE_OF_DOUBLE))
    model = model_responding(fewer.nbytes)
    return [
        json_of_shortest(model_responding(many.nbytes), many),
        json_of_doubles(model, fewer),
        json_of_doubles(model, with_nan(fewer, NAN_SHARE)),
    ]
