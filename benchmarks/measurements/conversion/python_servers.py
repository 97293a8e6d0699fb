"""Measures JSON requests to servers written in Python: directly, and through the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from benchmarks.harness.client import Connection
from benchmarks.harness.environment import Environment, Job, medians, start_offload, time_jobs
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import normal
from benchmarks.harness.rounds import Ratio
from benchmarks.measurements.conversion.json_speed import DIGITS, IMAGE_COUNT, check
from benchmarks.report import Row, at_least, milliseconds
from tests.integration.support.python_server import KServe, MLServer, PythonServer

_MODEL = "identity_fp32"
_DIRECT = "direct"


def kserve(env: Environment) -> list[Row]:
    """Measure KServe, which uses Python lists: in front of its HTTP port, and of its gRPC port."""
    return _rows(env, "KServe", KServe(), {"http": 3.5, "grpc": 10.0})


def mlserver(env: Environment) -> list[Row]:
    """Measure MLServer, whose HTTP port takes JSON only: in front of its gRPC port."""
    return _rows(env, "MLServer", MLServer(), {"grpc": 1.0})


def _rows(
    env: Environment, name: str, server: PythonServer, minima: Mapping[str, float]
) -> list[Row]:
    """Measure as many FP32 values as an image has; ``minima`` are the gains by the protocol."""
    values = normal(IMAGE_COUNT)
    with server, ExitStack() as stack:
        ports = {"http": server.http_port, "grpc": server.grpc_port}
        connections = {_DIRECT: stack.enter_context(Connection(ports["http"]))}
        for scheme in minima:
            gateway = stack.enter_context(
                running_gateway(ports[scheme], dialect=server.dialect, scheme=scheme)
            )
            start_offload(gateway)
            connections[scheme] = stack.enter_context(Connection(gateway.port))
        jobs: dict[str, Job] = {}
        for digits in DIGITS:
            request = digits.request(_MODEL, values)
            for path, connection in connections.items():
                check(connection, request, values)
                jobs[f"{path}, {digits.name}"] = partial(connection.time, request)
        times = time_jobs(env.rounds(15), jobs)
    return [
        _row(name, scheme, digits.name, times, minimum)
        for digits in DIGITS
        for scheme, minimum in minima.items()
    ]


def _row(
    name: str, scheme: str, digits: str, times: Mapping[str, list[float]], minimum: float
) -> Row:
    direct, through = f"{_DIRECT}, {digits}", f"{scheme}, {digits}"
    ratio, took = Ratio.of(times[direct], times[through]), medians(times)
    by = " by gRPC" if scheme == "grpc" else ""
    return Row(
        f"{name}{by}: JSON {IMAGE_COUNT:,} FP32, {digits}",
        milliseconds(took[direct]),
        milliseconds(took[through]),
        ratio.shown(1, "sooner"),
        at_least(ratio.median, minimum, f"{minimum:g} ×"),
    )
