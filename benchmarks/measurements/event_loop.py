"""How long one exchange keeps the event loop from all others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.harness.client import BenchmarkError, Connection
from benchmarks.harness.environment import Lab
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import Request, json_of_doubles, json_of_shortest, normal, with_nan
from benchmarks.harness.rounds import repeated
from benchmarks.measurements.json_speed import NAN_SHARE
from benchmarks.report import Row, below
from benchmarks.servers.raw_server import model_answering
from benchmarks.servers.timed_gateway import RESULT_MARK

_COMMAND = (sys.executable, "-m", "benchmarks.servers.timed_gateway")
_TEXT = 16_000_000
_TIMES = 4
"""How often each request is sent in a round."""
_MOST = 5.0  # milliseconds
_PER_VALUE_SHORTEST, _PER_VALUE_OF_DOUBLE = 10.9, 20.6  # bytes, with what stands between them


def holds(lab: Lab) -> list[Row]:
    """Measure the holds while JSON requests of 16 MB are converted, and answers of their size."""
    count = lab.rounds(3)
    requests = _requests() * _TIMES
    turns = np.concatenate(repeated(count, partial(_turns, lab.raw_port, requests)))
    longest = float(turns.max())
    return [
        Row(
            f"event loop held, {count * len(requests)} JSON requests of 16 MB",
            "",
            f"{longest:.2f} ms",
            f"p50 {np.quantile(turns, 0.5):.2f} ms, p99.9 {np.quantile(turns, 0.999):.2f} ms",
            below(longest, _MOST, f"{_MOST:.0f} ms"),
        )
    ]


def _turns(raw_port: int, requests: Sequence[Request]) -> NDArray[np.float64]:
    """Give the milliseconds of each turn of a gateway's loop meanwhile that was not idle."""
    with running_gateway(raw_port, _COMMAND) as gateway:
        with Connection(gateway.port) as through:
            for request in requests:
                through.time(request)
        printed = gateway.stop()
    _, mark, result = printed.partition(RESULT_MARK)
    if not mark:
        raise BenchmarkError(f"the watched gateway failed:\n{printed}")
    return np.array(orjson.loads(result)) / 1e6


def _requests() -> list[Request]:
    many = normal(int(_TEXT / _PER_VALUE_SHORTEST))
    fewer = normal(int(_TEXT / _PER_VALUE_OF_DOUBLE))
    model = model_answering(fewer.nbytes)
    return [
        json_of_shortest(model_answering(many.nbytes), many),
        json_of_doubles(model, fewer),
        json_of_doubles(model, with_nan(fewer, NAN_SHARE)),
    ]
