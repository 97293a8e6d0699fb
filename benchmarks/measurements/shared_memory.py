"""Compares binary and gRPC calls through shared memory with direct ones, JSON with and without it.

The clients are http.client and tritonclient, one call at a time, in front of a real Triton on the
same machine.
"""

from __future__ import annotations

import http.client
import statistics
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from importlib import import_module

import numpy as np
import orjson

from benchmarks.harness.client import HOST, BenchmarkError
from benchmarks.harness.environment import Environment, time_jobs
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import HEADER_LENGTH, Values, normal
from benchmarks.harness.rounds import Ratio
from benchmarks.report import Row, at_least, at_most
from tests.integration.triton.models import named
from tests.integration.triton.server import TritonServer

_SHAPE = (3, 224, 224)
_IMAGE = int(np.prod(_SHAPE))
_SHARED = {"size": "256MiB", "min_bytes": "128KiB"}
_DIRECT, _LANE, _SOCKET = "direct", "shared memory", "socket"
_BATCHES = ((1, 0.8, 40), (7, 0.65, 40), (27, 0.65, 12))
"""Images in a request, the most that it may take of the direct call's time, and rounds."""
_GRPC = (1, 0.9, 40)
"""The same of gRPC calls."""
_SMALL = 16_384
"""Elements of less than ``min_bytes``."""
_MAX_SMALL = 1.05
_MIN_GAIN = 9.0
_LARGEST = 2**28
"""Elements of 1 GiB."""
_MIN_SPEED = 3.5e9
_IN_A_ROW = 5

_Ports = dict[str, int]


def rows(env: Environment) -> list[Row]:
    """Measure the binary form by client and size, gRPC, JSON, and small tensors."""
    with ExitStack() as stack:
        ports = _start_gateways(stack, env.triton_port, "http")
        found = [
            *(_binary_row(env, ports, *each) for each in _BATCHES),
            *(_tritonclient_row(env, ports, "http", *each) for each in _BATCHES[:2]),
            _json_row(env, ports),
            _small_row(env, ports),
        ]
    with ExitStack() as stack:
        triton = stack.enter_context(TritonServer(named("image")))
        ports = _start_gateways(stack, triton.grpc_port, "grpc")
        return [*found, _tritonclient_row(env, ports, "grpc", *_GRPC)]


def _start_gateways(stack: ExitStack, server_port: int, scheme: str) -> _Ports:
    ports = {_DIRECT: server_port}
    for name, shared in ((_LANE, _SHARED), (_SOCKET, None)):
        running = running_gateway(server_port, access_log=True, scheme=scheme, shared=shared)
        ports[name] = stack.enter_context(running).port
    return ports


def largest(env: Environment) -> list[Row]:
    """Measure requests of 1 GiB."""
    shared = {"size": "1280MiB", "min_bytes": "128KiB"}
    with ExitStack() as stack:
        running = running_gateway(env.triton_port, access_log=True, shared=shared)
        ports = {_DIRECT: env.triton_port, _LANE: stack.enter_context(running).port}
        body, headers = _binary((_LARGEST,))
        times = _times(env, ports, "versioned", body, headers, rounds=10, in_a_row=1)
    speed = len(body) / _median(times[_LANE])
    return [
        Row(
            "binary request of 1 GiB, through shared memory",
            f"{len(body) / _median(times[_DIRECT]) / 1e9:.1f} GB/s",
            f"{speed / 1e9:.1f} GB/s",
            "",
            at_least(speed, _MIN_SPEED, f"{_MIN_SPEED / 1e9} GB/s"),
        )
    ]


def _binary_row(env: Environment, ports: _Ports, batch: int, most: float, rounds: int) -> Row:
    body, headers = _binary((batch, *_SHAPE))
    times = _times(env, ports, "image", body, headers, rounds)
    return _beside_direct(f"binary, {batch * _IMAGE:,} FP32, through shared memory", times, most)


def _tritonclient_row(
    env: Environment, ports: _Ports, protocol: str, batch: int, most: float, rounds: int
) -> Row:
    values = normal(batch * _IMAGE).reshape(batch, *_SHAPE)
    with ExitStack() as stack:
        jobs = {name: _tritonclient(stack, protocol, port, values) for name, port in ports.items()}
        times = time_jobs(env.rounds(rounds), jobs, _IN_A_ROW)
    what = f"tritonclient.{protocol}, {values.size:,} FP32, through shared memory"
    return _beside_direct(what, times, most)


def _beside_direct(what: str, times: dict[str, list[float]], most: float) -> Row:
    ratio = Ratio.of(times[_LANE], times[_DIRECT])
    without = Ratio.of(times[_SOCKET], times[_DIRECT])
    return Row(
        what,
        _shown(times[_DIRECT]),
        _shown(times[_LANE]),
        f"{ratio.shown(2, 'the direct time')}; over the socket {without.median:.2f} ×",
        at_most(ratio.median, most, f"{most} ×"),
    )


def _json_row(env: Environment, ports: _Ports) -> Row:
    spec = {"name": "INPUT0", "shape": [1, *_SHAPE], "datatype": "FP32"}
    text = orjson.dumps({"inputs": [{**spec, "data": normal(_IMAGE).astype(float).tolist()}]})
    times = _times(env, ports, "image", text, {})
    ratio = Ratio.of(times[_DIRECT], times[_LANE])
    beside = Ratio.of(times[_SOCKET], times[_LANE])
    return Row(
        f"JSON, {_IMAGE:,} FP32, shortest digits, through shared memory",
        _shown(times[_DIRECT]),
        _shown(times[_LANE]),
        f"{ratio.shown(1, 'sooner')}; {beside.median:.2f} × sooner than over the socket",
        at_least(ratio.median, _MIN_GAIN, f"{_MIN_GAIN:g} ×"),
    )


def _small_row(env: Environment, ports: _Ports) -> Row:
    times = _times(env, ports, "identity_fp32", *_binary((_SMALL,)))
    ratio = Ratio.of(times[_LANE], times[_SOCKET])
    return Row(
        f"binary, {_SMALL:,} FP32, below min_bytes",
        _shown(times[_DIRECT]),
        _shown(times[_LANE]),
        ratio.shown(2, "the time without shared memory"),
        at_most(ratio.median, _MAX_SMALL, f"{_MAX_SMALL} ×"),
    )


def _times(
    env: Environment,
    ports: _Ports,
    model: str,
    body: bytes,
    headers: dict[str, str],
    rounds: int = 40,
    in_a_row: int = _IN_A_ROW,
) -> dict[str, list[float]]:
    with ExitStack() as stack:
        jobs: dict[str, Callable[[], object]] = {}
        for name, port in ports.items():
            connection = stack.enter_context(closing(http.client.HTTPConnection(HOST, port, 60)))
            jobs[name] = partial(_call, connection, model, body, headers)
        return time_jobs(env.rounds(rounds), jobs, in_a_row)


def _call(
    connection: http.client.HTTPConnection, model: str, body: bytes, headers: dict[str, str]
) -> None:
    connection.request("POST", f"/v2/models/{model}/infer", body, headers)
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise BenchmarkError(f"the response has status {response.status}: {content[:500]!r}")


def _tritonclient(
    stack: ExitStack, protocol: str, port: int, values: Values
) -> Callable[[], object]:
    library = import_module(f"tritonclient.{protocol}")
    client = stack.enter_context(closing(library.InferenceServerClient(f"{HOST}:{port}")))

    def call() -> None:
        tensor = library.InferInput("INPUT0", list(values.shape), "FP32")
        tensor.set_data_from_numpy(values)
        if client.infer("image", [tensor]).as_numpy("OUTPUT0").size != values.size:
            raise BenchmarkError("tritonclient got a tensor of another size")

    return call


def _binary(shape: tuple[int, ...]) -> tuple[bytes, dict[str, str]]:
    data = normal(int(np.prod(shape))).tobytes()
    size = {"binary_data_size": len(data)}
    spec = {"name": "INPUT0", "shape": shape, "datatype": "FP32", "parameters": size}
    header = orjson.dumps({"inputs": [spec], "parameters": {"binary_data_output": True}})
    return header + data, {HEADER_LENGTH: str(len(header))}


def _median(times: list[float]) -> float:
    return statistics.median(times)


def _shown(times: list[float]) -> str:
    return f"{_median(times) * 1e3:.2f} ms"
