"""Compares binary calls through shared memory with direct ones, and JSON with and without it.

The clients are http.client, one call at a time, in front of a real Triton on the same machine.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import orjson

from benchmarks.harness.client import HOST, BenchmarkError
from benchmarks.harness.environment import Environment, time_jobs
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import HEADER_LENGTH, normal
from benchmarks.harness.rounds import Ratio
from benchmarks.report import Row, at_least, at_most

_PATH = "/v2/models/image/infer"
_SHAPE = (3, 224, 224)
_SHARED = {"size": "256MiB", "min_bytes": "128KiB"}
_DIRECT, _LANE, _SOCKET = "direct", "shared memory", "socket"
_BATCHES = ((1, 0.8), (8, 0.65))
"""Images in a request, and the most that it may take of the direct call's time."""
_MIN_GAIN = 1.1
_IN_A_ROW = 5


def rows(env: Environment) -> list[Row]:
    """Measure the binary form by size, and JSON."""
    with ExitStack() as stack:
        gateways = {
            name: stack.enter_context(
                running_gateway(env.triton_port, access_log=True, shared=each)
            )
            for name, each in ((_LANE, _SHARED), (_SOCKET, None))
        }
        ports = {_DIRECT: env.triton_port} | {name: g.port for name, g in gateways.items()}
        return [
            *(_binary_row(env, ports, batch, most) for batch, most in _BATCHES),
            _json_row(env, ports),
        ]


def _binary_row(env: Environment, ports: dict[str, int], batch: int, most: float) -> Row:
    times = _times(env, ports, _binary(batch), {HEADER_LENGTH: str(len(_header(batch)))})
    ratio = Ratio.of(times[_LANE], times[_DIRECT])
    without = Ratio.of(times[_SOCKET], times[_DIRECT])
    return Row(
        f"binary, {batch * int(np.prod(_SHAPE)):,} FP32, through shared memory",
        _shown(times[_DIRECT]),
        _shown(times[_LANE]),
        f"{ratio.shown(2, 'the direct time')}; over the socket {without.median:.2f} ×",
        at_most(ratio.median, most, f"{most} ×"),
    )


def _json_row(env: Environment, ports: dict[str, int]) -> Row:
    text = orjson.dumps(
        {"inputs": [{**_spec(1), "data": normal(_count(1)).astype(float).tolist()}]}
    )
    times = _times(env, {name: ports[name] for name in (_LANE, _SOCKET)}, text, {})
    ratio = Ratio.of(times[_SOCKET], times[_LANE])
    return Row(
        f"JSON, {_count(1):,} FP32, through shared memory",
        "",
        _shown(times[_LANE]),
        ratio.shown(2, "sooner than over the socket"),
        at_least(ratio.median, _MIN_GAIN, f"{_MIN_GAIN} ×"),
    )


def _times(
    env: Environment, ports: dict[str, int], body: bytes, headers: dict[str, str]
) -> dict[str, list[float]]:
    with ExitStack() as stack:
        jobs: dict[str, Callable[[], object]] = {}
        for name, port in ports.items():
            connection = stack.enter_context(closing(http.client.HTTPConnection(HOST, port, 60)))
            jobs[name] = partial(_call, connection, body, headers)
        return time_jobs(env.rounds(40), jobs, _IN_A_ROW)


def _call(connection: http.client.HTTPConnection, body: bytes, headers: dict[str, str]) -> None:
    connection.request("POST", _PATH, body, headers)
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise BenchmarkError(f"the response has status {response.status}: {content[:500]!r}")


def _binary(batch: int) -> bytes:
    return _header(batch) + normal(_count(batch)).tobytes()


def _header(batch: int) -> bytes:
    spec = {**_spec(batch), "parameters": {"binary_data_size": 4 * _count(batch)}}
    return orjson.dumps({"inputs": [spec], "parameters": {"binary_data_output": True}})


def _spec(batch: int) -> dict[str, object]:
    return {"name": "INPUT0", "shape": [batch, *_SHAPE], "datatype": "FP32"}


def _count(batch: int) -> int:
    return batch * int(np.prod(_SHAPE))


def _shown(times: list[float]) -> str:
    return f"{sorted(times)[len(times) // 2] * 1e3:.2f} ms"
